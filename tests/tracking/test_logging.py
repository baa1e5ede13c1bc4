import subprocess
import sys
from pathlib import Path

SPEAK = """
import logging, sys, warnings
from pathlib import Path
from titan_exp.tracking.logging import configure_logging, get_logger

rank, logs = int(sys.argv[1]), Path(sys.argv[2])
configure_logging(rank, logs)
configure_logging(rank, logs)
get_logger().info("step %d", 7)
get_logger().warning("beware")
get_logger().warning("beware")
for _ in range(3):
    warnings.warn("old function", UserWarning)
    logging.getLogger("some.library").warning("slow path")
logging.getLogger("some.library").info("chatter")
"""


def speak(rank: int, logs: Path) -> str:
    command = [sys.executable, "-W", "always", "-c", SPEAK, str(rank), str(logs)]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout


def without_time(text: str) -> list[str]:
    return [line[20:] for line in text.splitlines() if line[:2] == "20"]


def test_rank_0_logs_to_standard_output(tmp_path: Path) -> None:
    text = speak(0, tmp_path)
    lines = without_time(text)
    assert lines[:3] == ["step 7", "warning: beware", "warning: beware"]
    # Each text of a library once, however often it is said and configure_logging is called.
    assert len(lines) == 5
    assert "UserWarning: old function" in lines[3]
    assert lines[4] == "warning: slow path"
    assert "chatter" not in text
    assert not list(tmp_path.iterdir())


def test_other_ranks_write_warnings_to_their_own_file(tmp_path: Path) -> None:
    assert speak(3, tmp_path) == ""
    lines = without_time((tmp_path / "rank-3.log").read_text())
    assert len(lines) == 4
    assert lines[0] == "warning: beware"
    assert "old function" in lines[2]


def test_a_rank_without_warnings_leaves_no_file(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from titan_exp.tracking.logging import configure_logging, get_logger\n"
    )
    program += "configure_logging(1, Path(sys.argv[1])); get_logger().info('hello')"
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    assert not list(tmp_path.iterdir())
