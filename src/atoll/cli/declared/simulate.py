"""The simulators."""

from __future__ import annotations

from pathlib import Path

from atoll.cli.command import Command, argument, flag, option

SIMULATORS = (
    Command(
        "faults",
        "Commands",
        """Let faults happen to the shipped protocol in worlds of virtual time, and check its promises at every event.

        Everything in a world is drawn from its seed: settings, speeds, network, disk, and what goes wrong.

        Exit code 0: every promise holds. 1: one does not; then its seed is named, with a command that repeats
        it, the faults that it takes, and a story.

        Examples:
          atoll simulate faults --seeds 2000
          atoll simulate faults --seeds 2000 --first 2000        # on a second machine
          atoll simulate faults --seed 17 --learners 4
          atoll simulate faults --seeds 500 --worlds ranks       # with learners of several ranks, or …
          atoll simulate faults --seeds 500 --worlds shards      # … a syncer of several shards, or …
          atoll simulate faults --seeds 500 --worlds relays      # … relays between the two, or …
          atoll simulate faults --seeds 500 --worlds links       # … links of a given width
        """,
        "simulate:faults",
        (
            option("--seeds", "So many worlds: seeds 0, 1, 2, …", int, default=200),
            option("--first", "The seed of the first world, where others look at those before.", int, default=0),
            option("--learners", "Learners in every world. Drawn if not given.", int),
            option("--seed", "This world alone, with its story.", int),
            option(
                "--worlds",
                "plain; ranks: learners have several; shards: the syncer has several; relays: regions have them; "
                "links: they have a width.",
                default="plain",
            ),
            flag("--json", "As JSON.", name="json_"),
        ),
    ),
    Command(
        "bandwidth",
        "Commands",
        """Compute the bandwidth between data centers that a utilization takes, or the utilization that a bandwidth
        gives.

        Utilization is T / (T + exposed): T the time of a step, exposed what of its communication computing
        does not hide.

        Profiles: paper-table fits the published table (H = 100, P = 18), paper is what the paper's text says
        (H = P = 24), atoll is what this software does (a star through the syncer; up as the codec says, down
        as the version codec says, by default in fp32).

        A step of Atoll never waits for the network: a slow link costs freshness, not time. So decoupled rows
        also have effective_h, the H that the link keeps up with, and late_steps, by how much a fragment
        returns later than τ. Utilization counts exposed communication as if it were waited for, so that the
        methods compare.

        Examples:
          atoll simulate bandwidth
          atoll simulate bandwidth --profile atoll --parameters 7B --datacenters 4 --gbit-s 0.5,1,10 --latency-s 0.05
          atoll simulate bandwidth --utilization 90% --codec int8 --json
        """,
        "simulate_bandwidth:bandwidth",
        (
            option(
                "--profile",
                "Settings to begin with: paper-table, paper, atoll.",
                name="profile_",
                default="paper-table",
            ),
            option("--step-s", "Seconds of a learner step.", metavar="LIST", default="1,5"),
            option("--datacenters", "n: how many data centers.", metavar="LIST", default="2,8"),
            option("--utilization", "To be reached: 0.9, 90 or 90%. Else 0.5,0.75,0.9,0.95,0.99.", metavar="LIST"),
            option("--gbit-s", "Ask for the utilization at these bandwidths.", metavar="LIST"),
            option("--codec", "Of fragments: fp32, bf16, int8, int4, topk. Atoll: on their way up.", metavar="LIST"),
            option("--version-codec", "Of versions in a star, on their way down; one of the same.", metavar="NAME"),
            option("--methods", "What to compare.", metavar="LIST", default="data-parallel,decoupled"),
            option("--parameters", "Of the model: 5e9, 7B, 350M.", metavar="N"),
            option("--learners", "M: how many learners.", metavar="N"),
            option("--sync-every", "H: steps between two syncs of a fragment.", metavar="N"),
            option("--fragments", "P: at most H.", metavar="N"),
            option("--overlap", "τ: steps a fragment may be under way.", metavar="N"),
            option("--latency-s", "Between data centers, one way.", metavar="N"),
            option("--topology", "Of fragments: ring, star."),
            flag("--json", "As JSON.", name="json_"),
            flag("--csv", "As CSV.", name="csv_"),
            option("--plot", "Draw FILE.html or FILE.png.", Path, metavar="FILE"),
        ),
    ),
    Command(
        "goodput",
        "Commands",
        """What a cluster gives under failures: goodput, uptime, participation, merged share, tokens, lost time.

        Chips fail, slices leave and return, learners scale down and up or stand still; between them the
        shipped protocol runs the rounds. M = 1 is one data-parallel job over all chips, without and with
        elasticity. Intervals are for the mean, 95 %, over the seeds. Merged is the share of the work done
        that got into the model, of all learners and of the slowest one; speed.spread=1 makes the slowest
        learner take twice as long as the fastest.

        Examples:
          atoll simulate goodput --learners 1,4,16 --chips 150k,2.4M
          atoll simulate goodput --profile spot --learners 1,4,8,16 --chips 512
          atoll simulate goodput --set preemption.every_s=21600 --plot goodput.html
          atoll simulate goodput --learners 4 --chips 150k --rounds 400 --set speed.spread=1
        """,
        "simulate_goodput:goodput",
        (
            option("--profile", "paper, spot, or FILE.toml of your own.", default="paper", panel="The cluster"),
            option(
                "--learners",
                "M, a list: 1 is the cluster that steps together.",
                default="1,2,4,8,16",
                panel="The cluster",
            ),
            option(
                "--chips",
                "Chips of the whole cluster, a list.",
                default="150k,300k,600k,1.2M,2.4M",
                panel="The cluster",
            ),
            option("--slices", "What fails as a whole: machines, pods.", int, panel="The cluster"),
            option("--step-s", "Seconds of a step.", float, panel="The cluster"),
            option(
                "--set",
                "Any other key of the profile: preemption.every_s=43200.",
                name="set_",
                many=True,
                metavar="KEY=VALUE",
                panel="The cluster",
            ),
            flag("--show-profile", "Print the profile as TOML and end.", panel="The cluster"),
            option(
                "--methods",
                "Of data-parallel, elastic-data-parallel, synchronous-diloco, streaming-diloco, decoupled.",
                default="data-parallel,elastic-data-parallel,decoupled",
                panel="The rules",
            ),
            option("--quorum", "K.", int, panel="The rules"),
            flag(
                ("--grace", "--no-grace"),
                "Whether rounds have a grace window.",
                name="grace",
                default=None,
                panel="The rules",
            ),
            option("--hours", "Simulated time of each experiment.", float, default=48.0, panel="The rules"),
            option("--seeds", "Experiments per cell.", int, default=5, panel="The rules"),
            option(
                "--rounds",
                "Rounds of each experiment that run through the shipped protocol. 0: none.",
                int,
                default=100,
                panel="The rules",
            ),
            flag("--json", "As JSON.", name="json_", panel="Output"),
            flag("--csv", "As CSV.", name="csv_", panel="Output"),
            option("--plot", "A heat map over learners and chips.", Path, metavar="FILE.html|png", panel="Output"),
            option(
                "--timeline",
                "The learners of the last cell as lanes in time, with their failures.",
                Path,
                metavar="FILE.html|png",
                panel="Output",
            ),
        ),
    ),
    Command(
        "calibrate",
        "Commands",
        """Fit the goodput simulator's free constants to a table, or take them from a real run.

        A table: the constants are turned until the mean error is least; every cell is printed beside its
        figure. A run: step times, failures and recoveries come from its events, its goodput is predicted from
        these and held against what was measured. `--write` keeps the profile for `atoll simulate goodput
        --profile FILE.toml`.

        Examples:
          atoll simulate calibrate --free none
          atoll simulate calibrate --table mine.csv --free step_s,elasticity.outage_s --write mine.toml
          atoll simulate calibrate --from-run atoll-runs/first
        """,
        "simulate_goodput:calibrate",
        (
            option(
                "--table",
                "CSV: method,learners,chips,goodput,uptime in percent. Without it: the published table.",
                Path,
                metavar="FILE.csv",
            ),
            option("--from-run", "Take the constants from a real run instead.", Path, metavar="DIR"),
            option("--profile", "Where to begin: paper, spot, or FILE.toml.", default="paper"),
            option(
                "--free",
                "Keys to fit; those joined by + move together. none: only compare.",
                default="elasticity.down_s+elasticity.up_s,elasticity.outage_s,failures.scale_s",
            ),
            option("--hours", "Simulated time of each experiment.", float, default=24.0),
            option("--seeds", "Experiments per cell: 3 for a table, 100 for a run unless given.", int),
            option("--write", "Write the profile down.", Path, metavar="FILE.toml"),
            flag("--json", "As JSON.", name="json_"),
        ),
    ),
    Command(
        "upsizing",
        "Commands",
        """Compute what a newcomer costs those who are there, and what compute that comes and goes gains.

        Upsizing: a newcomer needs weights and two moments, 3 copies of the model. Data-parallel stands still
        for them. In Decoupled the others go on, so that it needs a fourth copy, of what changed; H steps of
        it are hidden, as it may be H rounds behind.

        Scavenging: the time of a run, as a fraction of that without extra compute.

        Examples:
          atoll simulate upsizing --copy-steps 5,20 --sync-every 24,100
          atoll simulate upsizing --parameters 5B --gbit-s 1,10 --step-s 5
          atoll simulate upsizing --extra 0.25,1 --hours 20-8 --work-h 500
        """,
        "simulate_upsizing:upsizing",
        (
            option(
                "--copy-steps",
                "c: steps in which a link carries one copy of the model. Else 2,6,12,24.",
                metavar="LIST",
            ),
            option("--parameters", "To compute c: of the model, as 5e9 or 7B.", metavar="N"),
            option("--gbit-s", "To compute c: the newcomer's link.", metavar="LIST"),
            option("--step-s", "To compute c: seconds of a step.", metavar="LIST", default="1"),
            option("--codec", "To compute c: fp32, bf16, int8, int4, topk.", metavar="LIST", default="fp32"),
            option("--sync-every", "H: steps between two syncs of a fragment.", metavar="LIST", default="24"),
            option("--extra", "Compute that comes on top: 0.25 is +25 %.", metavar="LIST", default="0.25,1.0"),
            option("--share", "Of the FLOPs, done with the extra. Else 0.5.", metavar="LIST"),
            option("--hours", "Instead of --share: when the extra is there, as 20-8.", metavar="FROM-TO"),
            option("--work-h", "With --hours: the run's hours without extra.", metavar="N", default="240"),
            flag("--json", "As JSON.", name="json_"),
            flag("--csv", "As CSV.", name="csv_"),
        ),
    ),
    Command(
        "tape",
        "Commands",
        """Write down who would be in which round, and when everybody would adopt what.

        `atoll train --tape FILE` trains under it, with real learners: the same bits each time.

        With --profile and --chips the failures are drawn as `atoll simulate goodput` draws them, and the tape
        says what goodput they leave. A learner that scales down or up makes no steps meanwhile; one without
        some of its slices makes fewer; one that lost all of them is gone, and recovers when it comes back.
        With as many --slices as learners, every failure takes a whole learner away.

        Without a profile, faults are given. Kinds: kill, leave, pause, suspend, slow, partition, and crash
        for the syncer. A learner that is only there for a while (scavenged) leaves and comes back.

        Examples:
          atoll simulate tape --profile paper --chips 1.2M --learners 8 --out paper.tape
          atoll simulate tape --profile paper --chips 150k --learners 8 --slices 8 --steps 1000 --seed 3
          atoll simulate tape mixed.tape --learners 4 --step-s 1,1,2,4 --fault kill:learner-1@40+20
          atoll train --tape mixed.tape --out atoll-runs/mixed
        """,
        "simulate_tape:tape",
        (
            argument(
                "file", "The file to write. Without it: --out, or a name that says what is on it.", Path, metavar="FILE"
            ),
            option("--out", "The file to write.", Path, metavar="FILE"),
            option("--learners", "M: how many learners.", int, default=4),
            option("--steps", "The run's length in learner steps.", int, default=200),
            option("--seed", "Of what is left to chance.", int, default=0),
            option("--profile", "paper, spot, or FILE.toml of your own.", panel="Drawn failures"),
            option("--chips", "Chips of the whole cluster: 1.2M, 150k.", metavar="N", panel="Drawn failures"),
            option("--slices", "What fails as a whole: machines, pods.", int, panel="Drawn failures"),
            option(
                "--set",
                "Any other key of the profile: preemption.every_s=43200.",
                name="set_",
                many=True,
                metavar="KEY=VALUE",
                panel="Drawn failures",
            ),
            option(
                "--fault",
                "kill:learner-1@40+20 (at 40 s, for 20 s); crash@60+5 for the syncer.",
                many=True,
                metavar="FAULT",
                panel="Given faults",
            ),
            option(
                "--step-s",
                "Seconds of a step: one for all, or one for each learner. With a profile: one.",
                shown="1, or the profile's",
                panel="The rules",
            ),
            option(
                "--latency-s", "Seconds that a message takes.", float, shown="0.02, or the profile's", panel="The rules"
            ),
            option(
                "--fragments",
                "P: at most as many as the model has rows.",
                int,
                shown="8, or the profile's",
                panel="The rules",
            ),
            option(
                "--sync-every",
                "H: steps between two syncs of a fragment.",
                int,
                shown="8, or the profile's",
                panel="The rules",
            ),
            option(
                "--overlap", "τ: steps a fragment may be away.", int, shown="2, or the profile's", panel="The rules"
            ),
            option(
                "--quorum", "K: the fewest learners of a round.", int, shown="1, or the profile's", panel="The rules"
            ),
            option(
                "--warm-start", "A first part at a small H, such as 0.15.", float, metavar="SHARE", panel="The rules"
            ),
        ),
    ),
)
