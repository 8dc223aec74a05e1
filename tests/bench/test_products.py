"""The bench of matrix products."""

from __future__ import annotations

from bench import products
from tests.support.devices import implementations_here


def test_every_product_is_in_the_table_with_its_limit(capsys, monkeypatch):
    monkeypatch.setattr(products, "_BYTES_OF_A_RUN", 0)  # two products
    run = products.main(["--models", "tiny", "--rows", "1", "--iterations", "1", "--rate", "1"])
    assert [one["product"] for one in run["results"]] == list(products.MODELS["tiny"])
    missing_here = "mosaic_gpu" not in implementations_here()
    for one in run["results"]:
        assert one["xla"]["us"]["median"] > 0
        missing = one["mosaic_gpu"].get("reason", "")
        assert missing.startswith("NotImplementedError: implementation=") == missing_here
    table = capsys.readouterr().out
    limit = 192 * 256 * 2 / 1e3  # microseconds at 1 GB/s
    assert f"| tiny | qkv | 1 | {limit:.1f} |" in table
    assert ("Missing numbers: NotImplementedError" in table) == missing_here
