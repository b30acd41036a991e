"""The pages on faults and divergence agree with the code.

What needs ranks to be seen is tested in test_orderly_ends, test_rollback and launcher/test_local.
"""

from __future__ import annotations

import dataclasses
import re

import yaml

from benchmarks.figures import ROOT
from distmp.config import RunConfig
from distmp.distributed import flight_recorder
from distmp.distributed.rank_monitor import RankStatus
from distmp.distributed.stopping import CHECK_EVERY
from distmp.engine import divergence_guard as divergence
from distmp.engine.divergence_guard import DivergenceConfig
from distmp.errors import HANG_EXIT_CODE, LOST_PEER_EXIT_CODE, STOPPED_EXIT_CODE, ConfigError
from distmp.faults.hang_report import report
from distmp.training.callbacks import stopping
from distmp.training.restarts import RESTARTS_WITHOUT_GAIN
from distmp.utils.settings import from_mapping

FAULTS = (ROOT / "docs" / "faults.md").read_text()
DIVERGENCE = (ROOT / "docs" / "divergence.md").read_text()
PAGES = " ".join((FAULTS + DIVERGENCE).split())


def test_settings_table_is_complete_with_defaults() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", DIVERGENCE, flags=re.DOTALL)
    values = yaml.safe_load(text)
    assert values["divergence"] == dataclasses.asdict(DivergenceConfig())
    assert from_mapping(RunConfig, values).divergence == DivergenceConfig()


def test_page_numbers_agree_with_code() -> None:
    codes = re.findall(r"^\| (\d+) \|", FAULTS, re.MULTILINE)
    failed = ["1", *map(str, (ConfigError.exit_code, LOST_PEER_EXIT_CODE, HANG_EXIT_CODE))]
    assert codes == ["0", str(STOPPED_EXIT_CODE), "130", *failed]
    for sentence, number in (
        ("asks all ranks every 8 microbatches", CHECK_EVERY == 8),
        ("After three restarts in a row", RESTARTS_WITHOUT_GAIN == 3),
        ("three times the slowest of the last 50 steps", stopping._STEPS_TO_STOP == 3),
        ("slowest of the last 50", stopping._STEPS_REMEMBERED == 50),
        ("1.5 times the longest save", stopping._SAVES == 1.5),
        ("and five seconds", stopping._END_SECONDS == 5),
        ("from the last 128 steps", divergence.WINDOW == 128),
        ("max(1.4826 * MAD,", divergence.DEVIATION_OF_MAD == 1.4826),
        ("1% of the median", divergence.SMALLEST_LOSS_DEVIATION == 0.01),
        ("their logarithm (0.05)", divergence.SMALLEST_LOG_NORM_DEVIATION == 0.05),
        ("threshold is 10", DivergenceConfig().threshold == 10),
        ("the first 100 steps are exempt", DivergenceConfig().warmup_steps == 100),
    ):
        assert sentence in PAGES, sentence
        assert number, sentence


def test_hang_report_agrees_with_code() -> None:
    (text,) = re.findall(r"```text\n(distmp: no rank .*?)```", FAULTS, flags=re.DOTALL)
    group = "the default group (nccl)"
    stack = 'File "my_data.py", line 55, in __getitem__\n  return self.remote.read(index)\n'
    (place,) = re.findall(r"in (synchronize \(.*?\))", text)
    answers = {
        0: RankStatus(
            doing="step 3, decision",
            idle=300,
            synchronizes=place,
            started={group: 41},
            last_started="all_gather",
            host="node1",
        ),
        1: RankStatus(
            doing="step 3, loading data", idle=301, started={group: 40}, stack=stack, host="node2"
        ),
    }
    pending = {0: {group: [(41, "all_gather")]}}
    assert f"distmp: {report(300, answers, {}, 2, pending).text}\n" == text
    assert f"torch's flight recorder of the last {flight_recorder.ENTRIES}" in PAGES
    assert f"Set `{flight_recorder.SIZE_VARIABLES[0]}`" in PAGES
