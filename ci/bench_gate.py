#!/usr/bin/env python3
"""Holds a measurement to the shares of the roofline that were recorded for its GPU.

    gemma4-bench … -o json | ci/bench_gate.py [--record]

Reads what `gemma4-bench -o json` printed. Every test that ci/bench_shares.json has for this device
must be there and reach at least 95 % of its recorded share; prints a line for each and exits 1 if
one does not. With --record it writes the shares of this measurement instead.
"""

import json
import re
import sys
from pathlib import Path

SHARES = Path(__file__).with_name("bench_shares.json")
ALLOWED = 0.95


def main() -> int:
    if sys.argv[1:] not in ([], ["--record"]):
        sys.exit(__doc__)
    try:
        measured = json.load(sys.stdin)
    except ValueError as error:
        sys.exit(f"error: no output of `gemma4-bench -o json`: {error}")
    # "cuda:0 NVIDIA H200 (132 of 132 multiprocessors, code for sm_90a)"
    device = re.sub(r"^cuda:\d+ | \(.*", "", measured["device"])
    reached = {
        f"{row['test']} at {row['depth']}": row["roofline"]["reached"]
        for row in measured["results"]
    }
    shares = json.loads(SHARES.read_text()) if SHARES.exists() else {}
    if sys.argv[1:]:
        shares[device] = {test: round(share, 3) for test, share in reached.items()}
        SHARES.write_text(json.dumps(shares, indent=2) + "\n")
        print(f"recorded {len(reached)} shares of {device}")
        return 0
    if device not in shares:
        sys.exit(f"error: no shares are recorded for {device}; record them with --record")
    losses = 0
    for test, recorded in shares[device].items():
        share = reached.get(test)
        good = share is not None and share >= ALLOWED * recorded
        losses += not good
        found = "not measured" if share is None else f"{share:.3f}"
        print(f"{'ok  ' if good else 'FAIL'} {test}: {found}, recorded {recorded:.3f}")
    return 1 if losses else 0


if __name__ == "__main__":
    sys.exit(main())
