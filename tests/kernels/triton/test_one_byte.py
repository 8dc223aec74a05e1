"""The PTX that converts int8 and fp8 K/V to f16, run by NumPy: a check that needs no GPU."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.kernels.triton.one_byte import _HALVES, _TO_F16

WORDS = np.arange(1 << 16, dtype=np.uint32)
PAIRS = WORDS | WORDS[::-1] << 16  # two words, as in a thread's registers


def halves(x):
    """The low and the high 16 bits, each as f16."""
    return [(x >> shift & 0xFFFF).astype(np.uint16).view(np.float16) for shift in (0, 16)]


def word(low, high):
    low, high = (x.astype(np.float16).view(np.uint16).astype(np.uint32) for x in (low, high))
    return low | high << 16


def lop3(a, b, c, table):
    terms = (
        (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        for i in range(8)
        if table >> i & 1
    )
    return np.bitwise_or.reduce(list(terms))


def prmt(a, b, selectors):
    places = [x >> shift & 0xFF for x in (a, b) for shift in (0, 8, 16, 24)]
    return sum(places[selectors >> 4 * i & 7] << 8 * i for i in range(4))


def float8(x):
    """The two bytes of a 16-bit register as f16, as `cvt` converts them."""
    of_bytes = ((x >> shift & 0xFF).astype(np.uint8) for shift in (0, 8))
    return word(*(y.view(jnp.float8_e4m3fn) for y in of_bytes))


def run(asm, argument):
    registers = {"$1": argument}

    def value(name):
        if name in registers:
            return registers[name]
        return np.full_like(argument, int(name, 0)) if name.startswith("0x") else int(name)

    for line in filter(None, map(str.strip, asm.split(";"))):
        operation, operands = line.split(" ", 1)
        if operands.startswith("{"):
            low, high, source = re.findall(r"[\w$]+", operands)
            registers[low], registers[high] = value(source) & 0xFFFF, value(source) >> 16
            continue
        out, *names = re.split(r",\s*", operands)
        arguments = [value(name) for name in names]
        if operation == "lop3.b32":
            result = lop3(*arguments[:3], int(names[3], 0))
        elif operation == "prmt.b32":
            result = prmt(arguments[0], np.full_like(argument, arguments[1]), int(names[2], 0))
        elif operation == "sub.f16x2":
            result = word(*(a - b for a, b in zip(*map(halves, arguments), strict=True)))
        elif operation == "cvt.rn.f16x2.e4m3x2":
            result = float8(*arguments)
        else:
            result = {"shr.b32": np.right_shift, "mov.b32": np.copy}[operation](*arguments)
        registers[out] = result
    return halves(registers["$0"])


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_every_byte_is_converted_exactly(kv_dtype):
    for half, place in zip(_HALVES, (0, 8), strict=True):
        made = run(_TO_F16[kv_dtype].format(**half), PAIRS)
        for actual, shift in zip(made, (0, 16), strict=True):
            meant = (PAIRS >> shift + place & 0xFF).astype(np.uint8).view(jnp.dtype(kv_dtype))
            np.testing.assert_array_equal(actual, meant.astype(np.float16))
