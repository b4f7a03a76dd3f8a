"""Commands that start a run, take part in one, or let others in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from atoll.cli.command import Command, Parameter, argument, flag, option
from atoll.cli.declared.shared import (
    JOIN,
    LEARNERS,
    TRAIN,
    describe_choices,
    find_run,
    find_run_or_address,
    find_run_or_bucket,
    find_shared_run,
    list_choices,
    run_argument,
    setting_option,
    suggest_setting,
)

RUN, SETTINGS, ADDRESS, PROCESSES, OUTPUT = "The run", "Its settings", "Where it listens", "Its processes", "Output"
STEPS = "1000 for the built-in GPT; none for a script"

# What both `atoll train` and `atoll syncer` take.
FOLDER = (
    option("--out", "The run's folder.", Path, metavar="DIR", shown="atoll-runs/DATE-TIME", panel=RUN),
    flag("--force", "Replace a run that lies there.", panel=RUN),
    option("--resume", "Go on with the run in this folder.", find_run, metavar="RUN", panel=RUN),
    option("--store", "Copy the run to a bucket, as s3://bucket/run.", metavar="URL", panel=RUN),
)
TRUST = flag("--trust", "With --resume: ask nothing about a run from elsewhere.", panel=RUN)
ACCEPT_LOSS = flag("--accept-loss", "Go on without a part of the journal that is lost.", panel=RUN)
ANY_SETTING = (
    option("--config", "Settings from a TOML file.", Path, metavar="FILE", panel=SETTINGS),
    setting_option(SETTINGS),
)
NAMED_SETTINGS = (
    option("--warm-start", "A first part at a small H, such as 0.15.", float, metavar="SHARE", panel=SETTINGS),
    option(
        "--share",
        "Or moments too, of inner optimizers.",
        ("parameters", "moments"),
        metavar="WHAT",
        shown="parameters",
        panel=SETTINGS,
        hidden=True,
    ),
    flag("--robust", "Leave out who points against the others.", panel=SETTINGS),
)


def end_options(steps: str) -> tuple[Parameter, ...]:
    """When the run ends. `steps`: the default in words."""
    text = "End at so many steps of the median stepping learner."
    return (
        option("--steps", text, int, shown=steps, panel=RUN),
        option("--tokens", "End after this many tokens in all.", int, shown="no limit", panel=RUN),
    )


RUNS = (
    Command(
        "train",
        TRAIN,
        """Train a model with M learners and a syncer on this machine.

        What follows -- goes to your script as it is. Every setting can be given by --set (docs/settings.md
        lists them); those that begin with workload. are the built-in GPT's, and not for your script.

        Examples:
          atoll train --learners 4 --steps 1000
          atoll train my_script.py --learners 2 --steps 500 -- --my-option 3
          atoll train --set quorum=2 --set codec=fp32 --set workload.depth=4
          atoll train my_script.py --learners 2 --steps 500 --algorithm data-parallel
          atoll train --resume atoll-runs/first --steps 2000
        """,
        "train:train",
        (
            argument("script", "Your training script; without one, a small GPT.", Path),
            option("--learners", "M: how many learners.", int, shown=LEARNERS, panel=RUN),
            option("--ranks", "Processes of each learner (DDP, FSDP).", int, shown="1", panel=RUN),
            *end_options(steps=STEPS),
            *FOLDER,
            option("--from-cut", "With --resume: a new run (--out) from this cut.", int, name="cut", panel=RUN),
            TRUST,
            replace(ACCEPT_LOSS, hidden=True),  # the line that refuses a run names it
            option("--tape", "Follow this scenario (atoll simulate tape).", Path, metavar="FILE", panel=RUN),
            option(
                "--algorithm",
                "Or data-parallel, to compare.",
                ("decoupled", "data-parallel"),
                default="decoupled",
                metavar="NAME",
                panel=RUN,
            ),
            flag("--demo", "A first run: one learner is killed on the way.", panel=RUN),
            *ANY_SETTING,
            option("--seed", "The seed of weights and data order.", int, shown="0", panel=SETTINGS),
            *NAMED_SETTINGS,
            option(
                "--max-restarts",
                "Restarts in a row of a learner that dies.",
                int,
                least=0,
                default=5,
                hidden=True,
            ),
            option("--syncer-shards", "Processes of the syncer, for a large model.", int, shown="1", hidden=True),
            option("--on", "A cluster: ray, or ray://HOST:PORT.", metavar="ENGINE", panel=PROCESSES),
            option("--gpus-per-learner", "With --on ray: GPUs of each.", float, shown="0", panel=PROCESSES),
            option(
                "--kill", "Kill a learner on the way: learner-2@0.4.", many=True, metavar="NAME@SHARE", panel=PROCESSES
            ),
            flag("--breakable", "Let atoll chaos --run break links and disk too.", hidden=True),
            flag("--json", "Print the summary as JSON.", name="json_", panel=OUTPUT),
            option("--tensorboard", "Write figures for TensorBoard, as it goes.", Path, metavar="DIR", panel=OUTPUT),
            option("--wandb", "Send figures to W&B, as it goes.", metavar="PROJECT", panel=OUTPUT),
        ),
        script=True,
        suggest=suggest_setting,
        appendix=list_choices,
    ),
    Command(
        "export",
        TRAIN,
        """Write the weights of a run as safetensors, also while it runs or after a kill.

        Examples:
          atoll export atoll-runs/first model.safetensors
          atoll export atoll-runs/first model.safetensors --tail 4
          atoll export atoll-runs/first averaged.safetensors --ema
          atoll export s3://bucket/run model.safetensors
        """,
        "look:export",
        (
            argument("run", "A run's folder, or its bucket.", find_run_or_bucket, required=True),
            argument("out", "A .safetensors file, or a folder for it and the settings.", Path, required=True),
            option("--cut", "What this cut holds, instead of the newest version.", int),
            flag("--best", "What scored best, instead of the newest version."),
            flag("--ema", "The moving average of the scored models, instead of the newest version."),
            option(
                "--tail",
                "Beside it, in OUT-tail.safetensors, the mean of the last versions of every fragment, one a cycle.",
                int,
                metavar="CYCLES",
            ),
            flag("--force", "Replace what lies there."),
            flag("--merged", "Without frozen parameters and buffers that are not merged."),
            flag("--parameter-names", "Also of a model whose state_dict() has other names than its parameters."),
        ),
    ),
    Command(
        "restore",
        TRAIN,
        """Bring a run back from its bucket into an empty folder, to go on with it there.

        A run whose last machine has not released it is brought back only with --take-over, unless it was kept with
        durability=store: it may have told learners of rounds that the bucket does not hold. Then a new run begins with
        the newest round that it holds.

        Examples:
          atoll restore s3://bucket/run atoll-runs/again && atoll train --resume atoll-runs/again
          atoll restore s3://bucket/run /scratch/run --take-over
          atoll restore s3://bucket/run copy --read-only && atoll verify copy
        """,
        "store:restore",
        (
            argument("url", "The bucket, as --store named it.", required=True),
            argument("out", "An empty folder, or one that is not there.", Path, required=True),
            flag("--take-over", "The machine that the run was on is gone."),
            flag("--read-only", "A copy to look at; the run may go on elsewhere."),
            replace(ACCEPT_LOSS, panel="Options"),
        ),
    ),
    Command(
        "upload",
        TRAIN,
        """Send to its bucket what a run that is not alive has not sent yet.

        Example:
          atoll upload atoll-runs/first
        """,
        "store:upload",
        (argument("run", "A run's folder.", find_run, required=True),),
    ),
    Command(
        "syncer",
        JOIN,
        """Start a syncer by hand; learners join with `atoll learn`.

        Ctrl-C ends the run in good order.

        Examples:
          atoll syncer --learners 2 --steps 500 --port 7077
          atoll cert && atoll syncer --bind 0.0.0.0 --keys atoll-keys --advertise syncer.example.org
          atoll syncer --learners 4 --set quorum=2 --set wait_for_learners_s=60
          atoll syncer --standby atoll-runs/20260101-120000 --port 7078
          atoll syncer --shard 2/2 --join http://127.0.0.1:7077 --out shard-2
        """,
        "serve:syncer",
        (
            *FOLDER,
            TRUST,
            ACCEPT_LOSS,
            option(
                "--standby",
                "Wait for the turn to serve the run in this folder.",
                find_shared_run,
                metavar="RUN",
                panel=RUN,
            ),
            option(
                "--shard", "Of a syncer of N processes the first, or another, which joins it.", metavar="I/N", panel=RUN
            ),
            option(
                "--join",
                "With --shard: the join link of the first, or a file.",
                env="ATOLL_JOIN",
                metavar="LINK",
                panel=RUN,
            ),
            option("--learners", "M: how many learners the run is meant for.", int, shown=LEARNERS, panel=RUN),
            *end_options(steps="no limit"),
            *ANY_SETTING,
            *NAMED_SETTINGS,
            option("--port", "Where to listen; 0 for any.", int, shown="7077, or the resumed run's own", panel=ADDRESS),
            option(
                "--bind",
                "The address to listen on; others than this machine's own need --keys.",
                metavar="ADDRESS",
                shown="127.0.0.1",
                panel=ADDRESS,
            ),
            option("--keys", "What atoll cert made.", Path, metavar="DIR", panel=ADDRESS),
            option(
                "--advertise",
                "HOST or HOST:PORT for the join link; several times for several.",
                many=True,
                metavar="HOST",
                panel=ADDRESS,
            ),
            flag("--mutual", "Learners must bring a certificate (atoll cert --learner).", panel=ADDRESS),
            option(
                "--front", "The certificate of a proxy in front that ends TLS.", Path, metavar="FILE", panel=ADDRESS
            ),
        ),
        suggest=suggest_setting,
        appendix=list_choices,
    ),
    Command(
        "learn",
        JOIN,
        """Run a script as one learner of a run that somebody else started.

        What follows -- goes to your script as it is. A link in a file, or in ATOLL_JOIN, is in no list of
        processes.

        Examples:
          atoll learn my_script.py --join atoll://TOKEN@syncer.example.org:7077/RUN/FINGERPRINT
          atoll learn my_script.py --syncer http://127.0.0.1:7077 --name learner-0
        """,
        "serve:learn",
        (
            argument("script", "Your training script, which uses atoll.Learner.", Path, required=True),
            option(
                "--join",
                "The join link that the syncer printed, or a file that holds it.",
                metavar="LINK",
                env="ATOLL_JOIN",
            ),
            option("--syncer", "Or where it listens on this machine; several with commas.", env="ATOLL_SYNCER"),
            option(
                "--name", "Its own in the run; by default this machine and the lowest free number.", env="ATOLL_LEARNER"
            ),
            option(
                "--folder",
                "Where it saves its part of cuts, or an evaluator the best model; default: atoll-learners/RUN/NAME.",
                Path,
                env="ATOLL_FOLDER",
            ),
            flag("--evaluator", "Score the global model instead (atoll.evaluate), and keep the best in --folder."),
            option("--ca", "The authority of the syncer's certificate.", Path, metavar="FILE", env="ATOLL_CA"),
            option("--cert", "Our own certificate (mutual TLS).", Path, metavar="FILE", env="ATOLL_CERT"),
            option("--key", "And its key.", Path, metavar="FILE", env="ATOLL_KEY"),
            option("--proxy", "An HTTP proxy to dial through.", metavar="URL", env="ATOLL_PROXY"),
        ),
        script=True,
    ),
    Command(
        "relay",
        JOIN,
        """Stand between the learners of one region and the syncer: one body for each round crosses the link.

        Learners join by the link that it writes to its folder. Of their contributions it sends the sum, and of each
        version it fetches one copy. If it dies, they go to the syncer directly. A run with keys refuses a
        learner's link here, such as the one that its syncer printed.

        Examples:
          atoll relay --join http://127.0.0.1:7077
          atoll cert --out relay-keys && atoll relay --join LINK --keys relay-keys --host 0.0.0.0
        """,
        "relay:relay",
        (
            option(
                "--join",
                "A link of a relay's token (atoll tokens add NAME --role relay), or its file.",
                metavar="LINK",
                env="ATOLL_JOIN",
            ),
            option("--out", "Its folder.", Path, metavar="DIR", shown="atoll-relays/NAME"),
            option("--name", "Its own in the run.", shown="relay-HOST"),
            option("--port", "Where it listens; 0 for any.", int, default=7171),
            option(
                "--host",
                "The address to listen on; others than this machine's own need --keys.",
                metavar="ADDRESS",
                default="127.0.0.1",
            ),
            option("--keys", "Its own certificate, as atoll cert made it.", Path, metavar="DIR"),
            option(
                "--advertise",
                "HOST or HOST:PORT for its link; several times for several.",
                many=True,
                metavar="HOST",
            ),
        ),
    ),
    Command(
        "drain",
        JOIN,
        """Let one learner leave without loss.

        Its last steps are collected, then it goes; Ctrl-C there does the same. The answer comes once it has heard
        that it is to leave, or after 8 s with what it waits for. The run goes on without it; if it was the last,
        until somebody comes.

        Example:
          atoll drain learner-2 --run atoll-runs/first
        """,
        "look:drain",
        (
            argument("learner", "Its name in the run.", required=True),
            option(
                "--run",
                "The run's folder, or a link with an operator's token; by default the newest run here.",
                find_run_or_address,
            ),
        ),
    ),
    Command(
        "set",
        JOIN,
        """Change settings of a run while it goes on; they are journaled.

        The same words as after --set of atoll train, for what may change: learners, steps, tokens, quorum, merge,
        outer_lr, grace, guard, cut_every and more. adopt, codec, version_codec, plan and outer_optimizer stay as the
        run began.

        Example:
          atoll set atoll-runs/first quorum=2 outer_lr=0.5
        """,
        "look:set_",
        (
            run_argument(),
            argument("words", "What changes, as key=value.", many=True, metavar="KEY=VALUE", required=True),
        ),
        appendix=describe_choices,
    ),
    Command(
        "scale",
        JOIN,
        """Give a run more or fewer learners while it goes on.

        Its controller (atoll train) starts learners, or asks those with the highest numbers to leave: their last
        steps are collected. Of a run whose learners were started by hand, what to do is printed.

        Examples:
          atoll scale atoll-runs/first 6
          atoll scale atoll-runs/first +2
        """,
        "look:scale",
        (
            run_argument(),
            argument("number", "How many learners; +2 for more, -3 for fewer.", metavar="N", required=True),
        ),
    ),
    Command(
        "cert",
        JOIN,
        """Make what a run needs to leave this machine: a certificate and a first token.

        Examples:
          atoll cert
          atoll cert --ca --host syncer.example.org && atoll cert --learner learner-0
          atoll cert --next && atoll tokens link     (and once learners have the new link: atoll cert --renew)
        """,
        "keys:cert",
        (
            option("--out", "Where the keys go.", Path, metavar="DIR", default=Path("atoll-keys")),
            option("--host", "A name or address the syncer is reached by; several times for more.", many=True),
            option("--days", "How long the certificate and its first tokens count.", float, default=365.0),
            flag("--ca", "With an authority of its own, for --learner."),
            option("--learner", "A certificate for this learner (mutual TLS).", metavar="NAME"),
            flag("--next", "The certificate that is to follow: links name both from then on.", name="following"),
            flag("--renew", "Another certificate in the place of this one; tokens stay."),
            flag("--force", "Replace keys that lie there, and old links."),
        ),
    ),
    Command(
        "tokens",
        JOIN,
        """Who may join a run: list, add, revoke, while it goes on.

        Alone it lists the tokens: who may join, and until when.

        Examples:
          atoll tokens
          atoll tokens add eu --learner 'eu-*' --most 4 --hours 24
          atoll tokens revoke eu
        """,
        "keys:show_tokens",
        (
            option(
                "--keys",
                "The folder that atoll cert made.",
                Path,
                metavar="DIR",
                env="ATOLL_KEYS",
                default=Path("atoll-keys"),
            ),
        ),
        commands=(
            Command(
                "list",
                "Commands",
                """The tokens, as without a command.

                Example:
                  atoll tokens list --json
                """,
                "keys:list_tokens",
                (flag("--json", "As JSON, without the secrets.", name="json_"),),
            ),
            Command(
                "add",
                "Commands",
                """One token more; its join link is printed, as soon as there is one.

                A link names where the syncer is, so there is none before the first syncer was started with
                these keys: `atoll tokens link NAME` prints it then.

                Example:
                  atoll tokens add anna --learner anna-laptop --hours 48
                """,
                "keys:add",
                (
                    argument("name", "What it is called; no secret.", required=True),
                    option("--role", "viewer, learner, evaluator, relay or operator.", default="learner"),
                    option("--learner", "Only for this learner, or with a star at the end for a group.", default=""),
                    option("--most", "So many learners at once; 0: any number.", int, default=0),
                    option("--names", "So many different names, those that have left included.", int, default=4096),
                    option(
                        "--hours",
                        "How long it counts; 0: until it is revoked.",
                        float,
                        default=8760.0,
                    ),
                ),
            ),
            Command(
                "change",
                "Commands",
                """Another measure for a token, while a run goes on; its link stays.

                Example:
                  atoll tokens change join --names 20000
                """,
                "keys:change_token",
                (
                    argument("name", "Which.", required=True),
                    option("--most", "So many learners at once; 0: any number.", int),
                    option("--names", "So many different names, those that have left included.", int),
                    option("--hours", "How long it counts from now; 0: until it is revoked.", float),
                ),
            ),
            Command(
                "revoke",
                "Commands",
                """One token less: whoever came by it is sent away within seconds.

                Example:
                  atoll tokens revoke anna
                """,
                "keys:revoke",
                (argument("name", "Which.", required=True),),
            ),
            Command(
                "link",
                "Commands",
                """The join link of a token, again. It is a secret: whoever has it can join.

                Examples:
                  atoll tokens link eu
                  atoll tokens link eu --ca
                  atoll tokens link --run atoll-runs/first
                """,
                "keys:link",
                (
                    argument("name", "Which.", default="join"),
                    flag("--ca", "By the authority of the certificate: stays good when it is renewed."),
                    option(
                        "--run",
                        "Of a run without keys, as atoll train begins: for its own machine.",
                        find_run,
                        metavar="RUN",
                    ),
                ),
            ),
        ),
    ),
)
