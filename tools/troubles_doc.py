"""docs/troubles.md, generated from the known troubles so that it cannot fall behind them.

python -m tools.troubles_doc
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from athanor.base.artifacts import write_text
from athanor.base.strict import read_yaml
from athanor.troubles.trouble import KNOWN, SEVERITIES, Trouble, troubles

PAGE = Path("docs/troubles.md")
HEAD = """# Known troubles

What goes wrong with machines and packages, why, and what to type. `athanor doctor` looks at the machine for those that show
beforehand; `athanor explain LOG` finds those that a log tells (`dmesg | athanor explain -`), `athanor explain` alone those of the last
run that failed, and `athanor repro` adds the likeliest to the end of a failed run by itself. What ruins results or freezes the machine
or a run also stops a training before it begins; an entry in [machine.yaml](machine.md), `known_troubles: [NAME]`, goes on all the same.

{counts}.

## Add one

An entry in a file of `athanor/troubles/known/`, and no line of Python:

```yaml
name-of-it:                       # letters, digits and -: the name in known_troubles and on this page
  title: What is wrong, in one line
  severity: stops                 # ruins (results), freezes, stops, slows, note
  cause: Why, in a sentence or two.
  fix: What to type.
  source: https://…               # where the fact comes from, or a file of docs/
  log: ['regular expression']     # found in a line of a log; and, or instead of it:
  exits: [-9, 137]                # the process ended so
  when: []                        # without log and exits: conditions on the machine that all hold
  example: {{log: the real message}}  # must find this entry and no other
```

A condition has one subject: `file` (a pattern of paths; their text), `mount` (the file system of a folder; its type and options),
`env`, `card` (graphics cards whose architecture has this expression), `package` (its version), `nvidia` (a field of
`nvidia-smi --query-gpu`), `setting` (a key of machine.yaml, such as `launch.processes`, or of
params.yaml, `params.pretrain.precision`, with `*` for any part: these for `athanor doctor` alone), `lanes: each` (PCIe, the fewest
on the way to each card). In the path of a file `$NAME` is an environment variable. And a question: `matches`, `absent` (values
are there, and none has the expression), `below`, `above`, `older`, `since` (numbers and versions; from the group of `matches`, if it
has one), `at_least`, `missing`, `denied`. Without a question the subject has to be there. With `log`, conditions narrow: a message that
means this only with certain versions. An example of a condition is a small machine: `files`, `denied`, `env`, `cards`, `packages`,
`nvidia`, `settings`. `symptom: true` is for what follows from another failure, which is then told first. Then:
`python -m tools.troubles_doc` and `TESTS=tests/troubles make quick`.

This page is generated. The words in the table are ours; the sources hold the facts.
"""


def entry(trouble: Trouble) -> str:
    how = "machine" if trouble.on_machine else "log"
    cells = (
        f'<a id="{trouble.name}"></a>`{trouble.name}`',
        trouble.severity,
        how,
        trouble.title,
        trouble.cause,
        trouble.fix,
    )
    source = trouble.source if trouble.source.startswith("https://") else trouble.source.removeprefix("docs/")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} | [source]({source}) |"


def page() -> str:
    known = troubles()
    by_severity = Counter(trouble.severity for trouble in known)
    looks, sources = sum(trouble.on_machine for trouble in known), len({trouble.source for trouble in known})
    severities = ", ".join(f"{by_severity[name]} {name}" for name in SEVERITIES)
    where = f"{looks} by a look at the machine, {len(known) - looks} by a log"
    counts = f"{len(known)} troubles from {sources} sources: {where}; {severities}"
    parts = [HEAD.format(counts=counts)]
    named = {trouble.name: trouble for trouble in known}
    for path in sorted(KNOWN.glob("*.yaml")):
        title = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").partition(". How")[0]
        parts += [
            f"\n## {title}\n",
            "| name | severity | found in | what | cause | fix | |",
            "|---|---|---|---|---|---|---|",
        ]
        parts += [entry(named[name]) for name in read_yaml(path)]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    write_text(PAGE, page())
