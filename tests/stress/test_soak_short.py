"""Each of the long runs (soak.py), for a few seconds."""

import pytest
import soak


@pytest.mark.parametrize("run", soak.RUNS, ids=lambda run: run.__name__)
def test_soak(run, ipc_folder):
    figures = run(2.0)
    assert figures["bytes checked"] > 0 or figures["operations"] > 100
