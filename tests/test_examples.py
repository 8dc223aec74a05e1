"""The programs of `examples/` run in their own size, and do what their pages say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest


def greedy(model, tokens, num_new, num_heads=4, num_kv_heads=2):
    """Tokens of `examples.flax_layer`, by dense attention."""
    for _ in range(num_new):
        x = model.embed(jnp.array(tokens))
        for layer in model.layers:
            heads = layer.qkv(x).reshape(len(x), -1, layer.head_dim)
            q, k, v = jnp.split(heads, (num_heads, num_heads + num_kv_heads), axis=1)
            y = jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
            x = x + layer.out(y.reshape(x.shape))
        tokens = [*tokens, int(model.embed.attend(x[-1]).argmax())]
    return tokens[-num_new:]


@pytest.mark.cpu_budget(6)  # compiles two steps
def test_the_flax_model_decodes_what_dense_attention_does(capsys):
    pytest.importorskip("flax")
    from examples import flax_layer

    found = flax_layer.main()
    assert "new tokens of each sequence" in capsys.readouterr().out
    model = flax_layer.Model(2, 100, 64, rngs=flax_layer.nnx.Rngs(0))
    assert found == [greedy(model, prompt, 6) for prompt in ([3, 1, 4, 1], [5, 9, 2])]


@pytest.mark.cpu_budget(6)
def test_the_equinox_samples_share_the_pages_of_their_prefix(capsys):
    pytest.importorskip("equinox")
    from examples import equinox_layer

    texts = np.array(equinox_layer.main())
    # Of 16 tokens the first 8 are one page for all three; the second page is each sample's own.
    assert capsys.readouterr().out == "three samples of 16 tokens in 4 pages\n"
    assert texts.shape == (3, 16) and (texts >= 0).all()
    assert (texts[:, :10] == texts[0, :10]).all() and len({tuple(x) for x in texts.tolist()}) == 3
