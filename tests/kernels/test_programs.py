"""Kernels lower to the programs on record: a change of structure changes no machine code."""

import json

import pytest

from tests.support.marks import slow
from tests.support.programs import GOLDENS, programs

if not GOLDENS.exists():
    pytest.skip(f"no programs on record for this JAX: {GOLDENS.name}", allow_module_level=True)

ON_RECORD = json.loads(GOLDENS.read_text())
FEW = {"decode 64x4096", "ragged 4x4096 512 tokens"}  # the default run
# Of options by themselves it has this one, and all of them together.
ALONE = {"sliding_window"}


COMPARED = [program for program in programs() if program.name in ON_RECORD]
QUICK = [
    program
    for program in COMPARED
    if any(few in program.name for few in FEW)
    and (len(program.options) != 1 or program.options.keys() == ALONE)
]


@pytest.mark.parametrize(
    "program", [*QUICK, *slow(x for x in COMPARED if x not in QUICK)], ids=lambda x: x.name
)
def test_kernels_lower_to_the_programs_on_record(program):
    assert program.digests() == ON_RECORD[program.name], (
        "the kernels of this call lower to other programs than those on record. If that is meant, "
        "measure the change, run `python -m tests.support.programs` and commit the result"
    )


def test_every_program_on_record_is_compared():
    assert ON_RECORD.keys() <= {program.name for program in programs()}
