"""What the fuzzer has kept, read again by everybody: a finding that was mended stays mended."""

import pytest

from tools.fuzz import CORPUS, TARGETS


@pytest.mark.parametrize("target", TARGETS)
def test_the_kept_inputs_are_read_without_a_finding(target):
    kept = sorted((CORPUS / target).iterdir())
    assert kept, "tools/fuzz has kept nothing for it"
    for file in kept:
        TARGETS[target](file.read_bytes())
