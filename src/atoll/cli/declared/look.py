"""Commands that look at a run, check it, repeat it or attack it."""

from __future__ import annotations

from pathlib import Path

from atoll.cli.command import Command, argument, flag, option
from atoll.cli.declared.shared import (
    ASK,
    LEARNERS,
    LOOK,
    TRUST,
    find_run,
    find_run_or_bucket,
    list_choices,
    run_argument,
    setting_option,
    suggest_setting,
)

SCRIPT = "Of a script"

LOOKING = (
    Command(
        "ls",
        LOOK,
        """List the runs here, and whether they are alive.

        Example:
          atoll ls
        """,
        "runs:ls",
        (
            argument("folder", "Where to look; by default atoll-runs and the folders here.", Path, metavar="DIR"),
            flag("--json", "As JSON.", name="json_"),
        ),
    ),
    Command(
        "status",
        LOOK,
        """See how a run is doing; of one that is over, what came of it.

        Example:
          atoll status atoll-runs/first --watch
        """,
        "look:status",
        (
            run_argument(),
            flag("--watch", "Stay and follow it."),
            flag("--json", "As JSON.", name="json_"),
        ),
    ),
    Command(
        "logs",
        LOOK,
        """Print what the processes of a run wrote.

        Examples:
          atoll logs atoll-runs/first learner-0
          atoll logs atoll-runs/first --follow
        """,
        "runs:logs",
        (
            argument("run", "A run's folder.", find_run, metavar="RUN", required=True),
            argument("name", "A process: syncer, evaluator, learner-0, …; by default all.", metavar="NAME"),
            option("--lines", "So many of the last lines of each.", int, least=0, default=20),
            flag(("--follow", "-f"), "Stay, and print what is new until it ends."),
        ),
    ),
    Command(
        "report",
        LOOK,
        """Write one page about a run: figures, timeline, losses, faults, ledger.

        The page needs nothing but itself. It also comes of a run that is going on or was killed, and says so
        at its top.

        Example:
          atoll report atoll-runs/first
        """,
        "look:report",
        (
            argument("run", "A run's folder.", find_run, metavar="RUN", required=True),
            option("--out", "The page; default DIR/report.html.", Path, metavar="FILE.html"),
            flag("--json", "Also print the figures as JSON.", name="json_"),
        ),
    ),
    Command(
        "dashboard",
        LOOK,
        """Print a link that opens the dashboard of a run in one browser.

        It opens once, within a day: ask for another for another one.

        Example:
          atoll dashboard atoll-runs/first
        """,
        "look:dashboard",
        (run_argument(),),
    ),
    Command(
        "verify",
        TRUST,
        """Check a run from its files alone.

        Journal, versions, weights, ledger, leases, cuts, parameters. Exit code 0: all is well. 1: something
        is wrong, and the first such thing is named.

        Examples:
          atoll verify atoll-runs/first
          atoll verify s3://bucket/run
        """,
        "look:verify",
        (
            argument("run", "A run's folder, or its bucket.", find_run_or_bucket, required=True),
            flag("--json", "As JSON.", name="json_"),
        ),
    ),
    Command(
        "replay",
        TRUST,
        """Run it again from its tape on this machine, and compare every version.

        The same scripts are told the same things after the same steps, as fast as this machine goes. The exit
        code is 0 when everything is bit-identical. Where learners were started by hand, name their script.

        Examples:
          atoll replay atoll-runs/first
          atoll replay atoll-runs/by-hand my_script.py -- --my-option 3
          atoll replay atoll-runs/first --until 200 --jobs 1
        """,
        "replay:replay",
        (
            argument("directory", "The run's folder.", find_run, metavar="RUN", required=True),
            argument("script", "The learners' script; without one, the run's own.", Path),
            option("--until", "Stop after this round.", int),
            option("--from-cut", "Begin with this cut of the run.", int, name="cut"),
            option("--jobs", "Learners that train at a time; 0: one per core.", int, default=0),
            option("--logs", "Keep what the scripts print in this folder.", Path),
            flag("--trust", "Ask nothing about a run from elsewhere."),
            flag("--json", "Print the result as JSON.", name="json_"),
        ),
        script=True,
    ),
    Command(
        "chaos",
        TRUST,
        """Attack a real run by a plan of faults, and get a verdict in numbers.

        Where the verdict compares with a run in peace, that one is made first. Exit code 0: everything holds
        that the plan asks for. 1: something does not. The same plan and seed are the same faults. With --run,
        the run that `atoll train` is busy with is attacked, by its own settings; the verdict is given when
        that run ends.

        Examples:
          atoll chaos examples/storm.toml
          atoll chaos examples/storm.toml my_script.py --seed 8 --out atoll-runs/storm
          atoll chaos examples/storm.toml --set quorum=2 --set codec=fp32
          atoll chaos examples/storm.toml --run atoll-runs/first
        """,
        "chaos:chaos",
        (
            argument("plan", "The plan of faults, TOML.", Path, required=True),
            argument("script", "Your training script; without one, a small GPT.", Path),
            option("--out", "The run's folder; the calm run's is beside it.", Path),
            option("--seed", "Draw other faults than the plan's seed does.", int),
            option(
                "--calm",
                "A calm run of the same plan that lies there already; several: their mean counts.",
                Path,
                many=True,
                metavar="DIR",
            ),
            option("--run", "Attack the run that goes on in this folder.", find_run, metavar="RUN"),
            setting_option("Options"),
            flag("--show", "Print the faults, and do nothing."),
            flag("--force", "Replace runs that lie there."),
            flag("--json", "The verdict as JSON.", name="json_"),
        ),
        script=True,
        suggest=suggest_setting,
        appendix=list_choices,
    ),
    Command(
        "compare",
        TRUST,
        """Train a script, or put the built-in GPT under faults, by several methods.

        A script (.py) is trained by each method for the same steps or tokens, one after another, and its
        validation losses are shown over tokens. Folders of runs that are over are only read.

        A plan of faults (TOML, as for atoll chaos) is for the built-in GPT: same model, batch per learner and
        pace; each method for the plan's time after everybody's first step. Kills, pauses, slowness, restarts
        and leaves of learner-i happen to rank i of the data-parallel methods; what they have not (a syncer,
        links to it) cannot fail there. Exit code 0: all of them ran.

        Examples:
          atoll compare my_script.py --learners 4 --steps 1000 -- --my-option 3
          atoll compare atoll-runs/one atoll-runs/other
          atoll compare examples/kills.toml --methods decoupled,elastic-data-parallel --out atoll-runs/kills
        """,
        "compare:compare",
        (
            argument("what", "A script, a plan of faults, or runs.", required=True, many=True),
            option("--out", "Where the runs go, each in a folder of its own.", Path),
            option(
                "--methods",
                "Which, in which order.",
                metavar="LIST",
                shown="all; for a script decoupled,data-parallel",
            ),
            option("--learners", "M: how many learners.", int, shown=LEARNERS, panel=SCRIPT),
            option("--steps", "Train for so many steps of a learner.", int, panel=SCRIPT),
            option("--tokens", "Train on so many tokens in all.", int, panel=SCRIPT),
            option("--seed", "The seed of weights and data order.", int, shown="0", panel=SCRIPT),
            option("--config", "Settings from a TOML file.", Path, metavar="FILE", panel=SCRIPT),
            setting_option(SCRIPT),
            option(
                "--checkpoint-every",
                "Steps between checkpoints of data-parallel; 0: one every 10 s.",
                int,
                metavar="STEPS",
                default=0,
            ),
            flag("--force", "Replace runs that lie there."),
            flag("--json", "The figures as JSON.", name="json_"),
        ),
        script=True,
        suggest=suggest_setting,
    ),
    Command(
        "doctor",
        ASK,
        """Say what would go wrong here: Python, torch, kernels, memory, disk, network, clock.

        With --join LINK (or a file with it, or ATOLL_JOIN) also on the way to that syncer:
        whether its addresses answer with the right certificate, round trip, bandwidth both ways, what TLS
        costs, how far the clocks are apart; and which H, P and codec the link can carry.

        Takes some seconds; writes 64 MiB to the disk and removes them. Exit code 0: nothing fails. 1:
        something does.

        Examples:
          atoll doctor
          atoll doctor --syncer http://127.0.0.1:7077 --out /data/runs
          atoll doctor --join link.txt --parameters 1B --step 0.8
        """,
        "doctor:doctor",
        (
            option(
                "--join",
                "Also the way to a syncer: its join link, or a file that holds it.",
                metavar="LINK",
                env="ATOLL_JOIN",
            ),
            option("--syncer", "The same by its address on this machine, or a run's folder.", metavar="URL|DIR"),
            option("--parameters", "With either: could the link carry this model? 7B, 350M.", metavar="N"),
            option("--step", "And how long its steps take.", float, metavar="SECONDS"),
            option("--out", "Where runs would be written.", Path, metavar="DIR", default=Path("atoll-runs")),
            flag("--json", "As JSON.", name="json_"),
        ),
    ),
    Command(
        "plan",
        ASK,
        """Plan a run over several sites: H, codecs, relays, learners, what to expect, and the commands.

        The file names sites (machines, speed, price, how often they are taken away), links and the model;
        examples/regions.toml has every key. Links are judged as `atoll simulate bandwidth` does, machines as
        `atoll simulate goodput` does. A link may take its figures from a file that `atoll doctor --join LINK
        --json` wrote in the site.

        Examples:
          atoll plan examples/regions.toml
          atoll plan regions.toml --json
        """,
        "plan:plan",
        (
            argument("file", "Sites, links and the model, as TOML.", Path, metavar="FILE.toml", required=True),
            option("--seeds", "Experiments for each site.", int, default=5),
            option("--hours", "Simulated time of each.", float, default=48.0),
            flag("--json", "As JSON.", name="json_"),
        ),
    ),
)
