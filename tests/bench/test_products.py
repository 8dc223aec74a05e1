"""The bench of matrix products, on a CPU."""

from __future__ import annotations

from bench import products


def test_every_product_is_in_the_table_with_its_limit(capsys, monkeypatch):
    monkeypatch.setattr(products, "_BYTES_OF_A_RUN", 0)  # two products
    run = products.main(["--models", "tiny", "--rows", "1", "--iterations", "1", "--rate", "1"])
    assert [one["product"] for one in run["results"]] == list(products.MODELS["tiny"])
    for one in run["results"]:
        assert one["xla"]["us"]["median"] > 0
        assert one["mosaic_gpu"]["reason"].startswith("NotImplementedError: implementation=")
    table = capsys.readouterr().out
    limit = 192 * 256 * 2 / 1e3  # microseconds at 1 GB/s
    assert f"| tiny | qkv | 1 | {limit:.1f} |" in table
    assert "Missing numbers: NotImplementedError" in table
