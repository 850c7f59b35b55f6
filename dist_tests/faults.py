# SPDX-License-Identifier: Apache-2.0
"""Faults on one rank, by set-up and place: what each rank says, and after how many seconds, beside
plain torch's.

    python -m dist_tests.faults                            all cases, half an hour of two cores
    python -m dist_tests.faults --setups fsdp2 --json out.json --minutes 10

Ranks are processes on the CPU, with gloo, which lets a rank wait for 40 s. The last rank faults.
See docs/faults.md.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

from dist_tests.multi import faults
from dist_tests.multi.faults import PLACES, WORLDS, Said

# seconds that a rank may notice later than plain torch's, of a machine that does other things
SLOWER = 5.0


class Case(NamedTuple):
    """A fault of the last rank. place: "" for models that differ from the start; fault: else the
    options of its model."""

    setup: str
    place: str
    fault: str

    @property
    def options(self) -> dict:
        return MISMATCHES[self.fault]

    @property
    def has_plain(self) -> bool:
        """Plain torch has this place."""
        return self.setup in ("fsdp2", "hsdp") or self.place in (
            "forward",
            "backward",
            "optimizer",
            "save",
        )


MISMATCHES = {
    "other shape": {"rows": 96},
    "other recipe": {"recipe": "mxfp8"},
    "other build": {"build": True},
    "no recipe": {"plain": True},
}
# Experts of this library and of plain torch have no collectives in common; groups of a mesh wait
# for torch's half an hour.
LEFT_OUT = (("ep", "no recipe"), ("hsdp", "no recipe"))
KNOWN = ("other shape", "other recipe", "other build")  # to all ranks, before anything travels


def cases(setups) -> list[Case]:
    found = [
        Case(setup, "", what)
        for setup in setups
        for what in MISMATCHES
        if (setup, what) not in LEFT_OUT
    ]
    for setup in setups:
        found += [Case(setup, place, fault) for place in PLACES[setup] for fault in faults.FAULTS]
        found += [Case(setup, "forward", "stop 10"), Case(setup, "forward", "nan")]
    return found


def run(case: Case, plain: bool = False) -> list[Said]:
    world = WORLDS[case.setup]
    if not case.place:
        return faults.run(world, faults.mismatched, case.setup, case.options)
    return faults.run(world, faults.faulty, case.setup, case.place, case.fault, plain)


def recovery(setup: str) -> list[list[str]]:
    """What is wrong behind exceptions (`faults.recovers`), by rank."""
    return [
        [one.text] if one.text else one.state
        for one in faults.run(WORLDS[setup], faults.recovers, setup)
    ]


def problem(case: Case, said: list[Said], of_plain: list[Said] | None = None) -> str | None:
    """What is wrong with what ranks said, or None."""
    others = said[:-1]
    if case.fault in KNOWN:
        same = len({one.text for one in said}) == 1 and said[0].text
        named = (
            "fsdp_quant is"
            if case.fault == "other build"
            else "weight is"
            if case.setup != "ep"
            else "Experts.up"
        )
        if not same or named not in said[0].text:
            return f"wanted one sentence that names the weight, got {[one.text for one in said]}"
        return (
            None
            if max(one.seconds for one in said) < faults.TIMEOUT / 2
            else f"it took {max(one.seconds for one in said):.1f} s"
        )
    if case.fault in ("nan", "no recipe") or case.fault.startswith("stop"):
        if any(one.text for one in said) and case.fault != "no recipe":
            return f"wanted ranks that go on, got {[one.text for one in said]}"
        return None
    if not all(one.text for one in others) and case.place not in ("optimizer", "cast"):
        unaware = [r for r, one in enumerate(others) if not one.text]
        return f"ranks {unaware} went on without the one that failed"
    late = max(one.seconds for one in others)
    most = SLOWER + (max(one.seconds for one in of_plain[:-1]) if of_plain else 0)
    return None if late <= most else f"a rank noticed after {late:.1f} s; wanted {most:.1f}"


def line(case: Case, said: list[Said], of_plain: list[Said] | None) -> str:
    texts = list(dict.fromkeys(one.text or "goes on" for one in said[:-1]))
    seconds, plain = (
        max(one.seconds for one in said[:-1]),
        "" if not of_plain else f"{max(one.seconds for one in of_plain[:-1]):.1f}",
    )
    what = " / ".join(text if len(text) < 150 else text[:147] + "..." for text in texts).replace(
        "|", "/"
    )
    of = case.setup, case.place or "set-up", case.fault
    cells = *of, what, said[-1].text[:60] or "goes on", f"{seconds:.1f}", plain
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--setups", nargs="*", default=list(PLACES), choices=list(PLACES))
    parser.add_argument("--faults", nargs="*", help="these alone")
    parser.add_argument("--json", type=Path, help="write what ranks said")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no case after so many")
    args = parser.parse_args()
    end, wrong, found = time.monotonic() + 60 * args.minutes, [], []
    print(
        "| set-up | place | fault of the last rank | the others say | it says | after s | plain "
        "torch's after s |\n" + "|---" * 7 + "|"
    )
    for case in cases(args.setups):
        if time.monotonic() > end or (args.faults and case.fault not in args.faults):
            continue
        said = run(case)
        of_plain = run(case, plain=True) if case.place and case.has_plain else None
        print(line(case, said, of_plain), flush=True)
        found.append([*case, said, of_plain])
        if (why := problem(case, said, of_plain)) is not None:
            wrong.append(f"{case}: {why}")
    for setup in args.setups:
        if time.monotonic() < end and not args.faults:
            of = list(dict.fromkeys(text for one in recovery(setup) for text in one))
            wrong += of
            print(
                f"{setup}: after exceptions of all ranks at each place the next steps have "
                f"{'OTHER bits' if of else 'the same bits'}"
            )
    if args.json:
        args.json.write_text(json.dumps(found))
    print(*(wrong or ["every rank behaved as docs/faults.md says"]), sep="\n")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
