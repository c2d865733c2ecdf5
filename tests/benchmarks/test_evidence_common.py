"""What the evidence of several tasks shares."""

from benchmarks.evidence_common import seconds

from setstream.report.runs import FinishedRun
from setstream.training import TrainConfig


def test_the_time_of_a_resumed_run_is_that_of_all_its_steps(tmp_path):
    config = TrainConfig("documents", "deepsets")
    assert seconds(FinishedRun(tmp_path, config, result={"step": 400, "steps_timed": 100, "seconds": 30.0})) == 120.0
    assert seconds(FinishedRun(tmp_path, config, result={"step": 400, "seconds": 30.0})) == 30.0
