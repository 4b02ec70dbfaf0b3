"""Runs the fuzz targets on the inputs that the fuzzer has kept: regressions of its findings."""

import pytest

from tools.fuzz import CORPUS, TARGETS


@pytest.mark.parametrize("target", TARGETS)
def test_the_kept_inputs_cause_no_finding(target):
    inputs = sorted((CORPUS / target).iterdir())
    assert inputs, "tools/fuzz has kept no input for this target"
    for file in inputs:
        TARGETS[target](file.read_bytes())
