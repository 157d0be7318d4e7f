"""Runs the cases of docs/history/wrong-results.md on a GPU, each in a process of its own.

    python tests/wrong_results.py [CASE …]

prints a line for each: right, wrong, dies (the context is lost), or refused (another error, as where cuDNN has no plan).
"""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "history" / "wrong-results.md"


def programs() -> tuple[str, dict[str, str]]:
    """What all cases share, and each case by its name."""
    text = PAGE.read_text(encoding="utf-8")
    shared, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return shared, dict(re.findall(r"^### (\w+)\n.*?```python\n(.*?)```", text, re.DOTALL | re.MULTILINE))


def outcome(program: str, case: str) -> str:
    """Run a case's program; what it printed, or how it ended."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    if done.stdout:
        return done.stdout.strip()
    lines = done.stderr.strip().splitlines()
    lost = [line for line in lines if "CUDARuntimeError" in line]
    if lines and not lost and "Traceback" in done.stderr:
        return f"{case}: refused ({lines[-1]})"
    return f"{case}: dies ({lost[-1] if lost else f'the process ended with {done.returncode}'})"


def main(names: list[str]) -> None:
    """Run the cases of these names, or all."""
    shared, cases = programs()
    chosen = names or list(cases)
    with ThreadPoolExecutor(4) as threads:
        for line in threads.map(outcome, [f"{shared}\n{cases[name]}" for name in chosen], chosen):
            print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
