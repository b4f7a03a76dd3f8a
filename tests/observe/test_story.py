from __future__ import annotations

from collections.abc import Callable
from io import StringIO

from rich.console import Console

from atoll.observe.story import WARNING, conclude, describe_no_rounds, find_shortfall, last_sample, print_closing, story
from atoll.observe.summary import summarise
from atoll.store.verify import VerifyReport
from atoll.telemetry.events import Event


def test_the_story_of_a_run_with_a_kill(events: list[Event]) -> None:
    told = story(summarise(events), events)
    assert told == [
        "2 learners made 24 steps together on 240 tokens in 10 s; 68 % of learner time went into steps.",
        "b was killed 4.0 s in and was contributing again 2.0 s after its restart.",
        "7 committed rounds with 86 % of the learners alive in them (participation); "
        "the longest pause between two was 2.0 s (median 1.5 s).",
        "Of the tokens, 81 % were merged into the model (merged share), 8 % were dropped when a learner adopted a "
        "newer version and 10 % were lost with a process.",
        "Validation loss of the global model went from 5.50 to 2.25.",
        "Warning: 1 contribution refused (the last: not finite).",
    ]


def test_tokens_that_no_death_explains_were_too_late_for_the_end(events: list[Event]) -> None:
    alive = [event for event in events if event["kind"] not in ("lost", "left")]
    told = " ".join(story(summarise(events), alive))
    assert "% were lost at the run's end, made too late to be collected" in told and "with a process" not in told


def test_losses_and_metrics_are_told_in_the_words_of_the_script(events: list[Event]) -> None:
    summary = summarise(events)
    accuracy = {"direction": "max", "start": 0.1, "end": 0.91, "best": 0.925, "best_round": 1300}
    summary |= {"training_loss_start": 2.31, "training_loss_end": 0.0421, "metrics": {"accuracy": accuracy}}
    told = story(summary | {"loss_unit": "nats per byte"}, events)
    assert "Training loss of the learners went from 2.31 to 0.0421." in told
    assert "Validation loss of the global model went from 5.50 to 2.25 nats per byte." in told
    assert "Its accuracy went from 0.1 to 0.91; the best was 0.925 at round 1,300." in told


def test_a_scorer_that_failed_is_why_nothing_was_scored(events: list[Event]) -> None:
    text = (
        "evaluator failed: TypeError: the scorer score (line 3 of train.py) returned str as 'loss' (train.py, line 9)"
    )
    kept = [event for event in events if event["kind"] != "score"]
    failed = {"at": 1009.0, "kind": "exited", "process": "evaluator", "code": 1, "text": text}
    told = [one for one in story(summarise([*kept, failed]), [*kept, failed]) if "never scored" in one]
    assert told == [f"{WARNING}the global model was never scored, so nothing is known of its validation loss: {text}."]


def test_a_best_that_is_near_the_last_is_told_apart_from_it(events: list[Event]) -> None:
    accuracy = {"direction": "max", "start": 0.0713, "end": 0.9953, "best": 0.9993, "best_round": 303}
    close = {**accuracy, "end": 0.99802, "best": 0.99804}
    told = story(summarise(events) | {"metrics": {"accuracy": accuracy, "recall": close}}, events)
    assert "Its accuracy went from 0.0713 to 0.9953; the best was 0.9993 at round 303." in told
    assert "Its recall went from 0.0713 to 0.99802; the best was 0.99804 at round 303." in told


def test_metrics_alone_are_scores_too(events: list[Event]) -> None:
    summary = summarise(events) | {"validation_loss_start": None, "validation_loss_end": None}
    never = f"{WARNING}the global model was never scored"
    assert any(one.startswith(never) for one in story(summary, events))
    accuracy = {"direction": None, "start": 0.1, "end": 0.9, "best": None, "best_round": None}
    told = story(summary | {"metrics": {"accuracy": accuracy}}, events)
    assert "Its accuracy went from 0.1 to 0.9." in told and not any(one.startswith(never) for one in told)


def test_what_was_not_merged_is_told_by_cause_and_by_learner(events: list[Event]) -> None:
    causes = {"overlap": 15, "missed": 5, "crash": 25}
    tokens = {"computed": 240, "merged": 195, "dropped": 20, "lost": 25, "in_flight": 0}
    fates = {"dropped_by_cause": causes, **tokens}
    shares = {"a": {**fates, "merged_share": 0.9}, "b": {**fates, "merged_share": 0.4}}
    events[-1] |= {"tokens": tokens, "dropped_by_cause": causes, "fates": shares}
    low = {"at": 1009.0, "kind": "low_share", "learner": "b", "over": False, "text": "only 31 % of b's last work"}
    over = {**low, "over": True, "text": "all of b's last work was merged again"}
    events[-3:-3] = [low, over]
    told = " ".join(story(summarise(events), events))
    assert "8 % were dropped when a learner adopted a newer version (6 % by overlap, 2 % in missed rounds)" in told
    assert "By learner, from 40 % (b) to 90 % (a) were merged." in told
    assert f"{WARNING}b was merged less than the others for a while (the last: only 31 % of b's last work)" in told
    events.remove(over)
    assert "b was merged less than the others until the end (the last: only" in " ".join(
        story(summarise(events), events)
    )


def test_what_was_not_merged_at_the_cut_that_a_run_is_made_of_is_no_loss_of_its_own(events: list[Event]) -> None:
    tokens = {"computed": 240, "merged": 195, "dropped": 0, "lost": 45, "in_flight": 0}
    causes = {"overlap": 0, "missed": 0, "crash": 33, "cut": 12}
    events[-1] |= {"tokens": tokens, "dropped_by_cause": causes, "parent": "75851b74 cut 240"}
    summary = summarise(events)
    told = " ".join(story(summary, events))
    assert "5 % were computed before this run began, and not merged at cut 240" in told
    assert "14 % were lost with a process" in told, "the rest of what is lost"
    console = Console(width=80, file=StringIO())
    print_closing(console, summary, [])
    assert "not in cut 240" in console.file.getvalue() and "12 tokens" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_data_parallel_run_is_told_by_its_processes(events: list[Event]) -> None:
    events[0] |= {"data_parallel": 2}
    assert story(summarise(events), events)[0].startswith("2 data-parallel processes made 24 steps")
    shown = []
    for processes in (0, 2):
        console = Console(width=80, file=StringIO())
        print_closing(console, summarise(events) | {"data_parallel": processes}, [])
        shown.append(console.file.getvalue())  # type: ignore[attr-defined]
    for label in ("effective H", "its mean, p95", "overlap (τ)", "outer step, ρ"):
        assert label in shown[0] and label not in shown[1], "nothing is merged there"


def test_a_learner_by_hand_that_came_back_as_another_process_is_told(events: list[Event]) -> None:
    by_hand = [event for event in events if event["kind"] not in ("started", "killed", "exited", "restarted")]
    assert "b was lost and started again once." in story(summarise(by_hand), by_hand)
    [again] = [event for event in by_hand if event["kind"] == "joined" and event["incarnation"] == 2]
    again["known_as"] = 1
    assert not [one for one in story(summarise(by_hand), by_hand) if "started again" in one], "the same process"


def test_ranks_that_came_back_without_a_snapshot_become_a_warning(events: list[Event]) -> None:
    [again] = [event for event in events if event["kind"] == "restarted"]
    again["fresh"] = False
    assert "began anew" not in " ".join(story(summarise(events), events))
    again["fresh"] = True
    assert f"{WARNING}b came back once before its first snapshot, so its inner optimizer" in " ".join(
        story(summarise(events), events)
    )


def test_logs_are_named_where_learners_were_started_here(events: list[Event]) -> None:
    summary = summarise(events)
    summary["settings"] |= {"learners": 3}
    syncer, learner = ({"at": 1.0, "kind": "started", "process": name, "text": ""} for name in ("syncer", "learner-0"))
    by_hand = " ".join(story(summary, [syncer]))
    assert "only 2 of 3 learners ever joined." in by_hand and "logs/" not in by_hand
    assert "only 2 of 3 learners ever joined; logs/ says why." in " ".join(story(summary, [syncer, learner]))


def test_a_run_that_was_never_scored_says_how_it_is_scored_by_hand(events: list[Event]) -> None:
    """The script of a learner that was started by hand may have its scorer: nobody ran it."""
    summary = summarise(events) | {"validation_loss_start": None, "validation_loss_end": None}
    syncer, learner = ({"at": 1.0, "kind": "started", "process": name, "text": ""} for name in ("syncer", "learner-0"))
    by_hand, by_train = (" ".join(story(summary, one)) for one in ([syncer], [syncer, learner]))
    assert "validation loss: atoll learn SCRIPT --evaluator scores it" in by_hand
    assert "validation loss: a script scores it with atoll.evaluate." in by_train


def test_learners_on_the_same_batches_become_a_warning(events: list[Event]) -> None:
    text = "a and b train on the same batches, so one of them works for nothing"
    events.insert(-3, {"at": 1009.0, "kind": "same_batches", "learner": "a", "other": "b", "text": text})
    assert f"{WARNING}{text}." in " ".join(story(summarise(events), events))


def test_bad_figures_become_warnings(events: list[Event]) -> None:
    summary = summarise(events)
    summary |= {"effective_h": 2.0, "participation": 0.4, "validation_loss_start": None, "refusals": 0}
    summary["settings"] |= {"learners": 3}
    summary["per_learner"]["b"]["rounds"] = 0
    warnings = " ".join(sentence for sentence in story(summary) if sentence.startswith(WARNING))
    for words in (
        "synced every 2 learner steps, where 4 were asked for",
        "only 40 % of the learners alive",
        "b never contributed",
        "never scored",
        "only 2 of 3 learners ever joined",
    ):
        assert words in warnings


def test_a_larger_h_is_told_with_the_part_that_makes_it(events: list[Event]) -> None:
    summary = summarise(events)
    summary |= {"effective_h": 9.0, "narrowest": "way down of b: 58 of 60 Mbit/s"}
    told = "synced every 9 learner steps, where 4 were asked for (way down of b: 58 of 60 Mbit/s)."
    assert told in " ".join(story(summary))


def test_a_link_that_carried_a_share_of_the_rounds_is_told(events: list[Event], say: Callable[..., Event]) -> None:
    text = "b: way down of b carries 15 Mbit/s, every round takes 60: it takes part in 25 % of the rounds"
    shares = [say(3.5, "share", learner="b", incarnation=1, share=0.25, text=text)]
    shares.append(
        say(5.5, "share", learner="b", incarnation=1, share=1.0, text="b: its link carries every round again")
    )
    events = sorted([*events, *shares], key=lambda event: float(event["at"]))
    told = " ".join(story(summarise(events), events))
    assert "The link of b let it take part in 75 % of the rounds (the last: way down of b carries 15 Mbit/s" in told
    assert "The link of a" not in told


def test_equal_shares_of_the_learners_are_not_told(events: list[Event]) -> None:
    summary = summarise(events)
    for one in summary["per_learner"].values():
        one["merged_share"] = 0.93
    assert not any("By learner" in line for line in story(summary))


def test_a_restart_without_a_kill_is_told(events: list[Event]) -> None:
    events = [event for event in events if event["kind"] != "killed"]
    assert any(line.startswith("b died and came back (") for line in story(summarise(events), events))


def test_a_shard_came_back_when_it_was_started_again(events: list[Event]) -> None:
    at = events[-1]["at"]
    ended = {"at": at, "kind": "exited", "process": "shard-2", "code": -9, "text": "shard-2 ended: killed by SIGKILL"}
    again = {"at": at, "kind": "restarted", "process": "shard-2", "pid": 7, "text": "shard-2 was started again"}
    told = story(summarise(events), [*events, ended, again])
    assert any("shard-2 died and came back (ended: killed by SIGKILL)" in line for line in told)


def test_only_who_joined_again_came_back(events: list[Event]) -> None:
    """A restart alone is none: the run may end before the new process is there."""
    events = [e for e in events if e["kind"] != "killed" and not (e["kind"] == "joined" and e["incarnation"] == 2)]
    told = story(summarise(events), events)
    assert any(line.startswith("b died and did not come back (") for line in told)
    assert not any("came back" in line for line in told)


def test_who_was_killed_since_it_never_made_a_step_did_not_just_die(say: Callable[..., Event]) -> None:
    """ "died and did not come back (killed by SIGKILL)", and it was our own kill."""
    exits = [say(9.0, "exited", process=name, code=-9, stepless=True) for name in ("learner-0", "learner-1")]
    told = story(summarise(exits), exits)
    assert "learner-0 and learner-1 were killed at the end: they had made no step." in told
    assert not any("died" in sentence for sentence in told)


def test_one_that_sigterm_ended_before_it_joined_did_not_die(say: Callable[..., Event]) -> None:
    ended = say(9.0, "exited", process="learner-0", code=143, unjoined=True)
    own_handler = say(9.0, "exited", process="learner-1", code=143)
    told = [line for line in story(summarise([ended]), [ended, own_handler]) if "died" in line]
    assert len(told) == 1 and told[0].startswith("learner-1 died and did not come back")


def test_who_came_back_and_died_again_is_told_once(say: Callable[..., Event], events: list[Event]) -> None:
    mistake = "failed: ValueError: odd (mine.py, line 9)"
    deaths = []
    for at in (9.2, 9.4):
        for name in ("a", "b"):
            deaths.append(say(at, "exited", process=name, code=1, text=f"{name} {mistake}"))
            deaths.append(say(at, "joined", learner=name, incarnation=3))
    lasting = [event for event in deaths if not (event["kind"] == "joined" and event["at"] == 1009.4)]
    told = [line for line in story(summarise(events), lasting) if " died " in line]
    assert told == [f"a and b died more than once and did not come back the last time ({mistake})."]


def test_a_run_that_was_gone_on_with_says_so(events: list[Event]) -> None:
    told = {**summarise(events), "resumes": [{"at_s": 1.0, "after": "killed"}, {"at_s": 2.0, "after": "ended"}]}
    counted = "Its end and its start each time count in goodput, uptime and liveness; the time between does not."
    assert f"It was stopped once and killed as a whole once, and resumed each time. {counted}" in story(told, events)
    told["resumes"] = [{"at_s": 1.0, "after": "ended"}]
    assert f"It was stopped once and resumed. {counted}" in story(told, events)


def test_a_killed_learner_that_never_came_back(events: list[Event]) -> None:
    summary = summarise(events)
    for entry in summary["recovery"]:
        entry["seconds"] = None
    assert "b was killed 4.0 s in and restarted, but contributed to no round after that." in story(summary)
    summary["recovery"].pop()
    assert "b was killed 4.0 s in and was not restarted." in story(summary)


def test_a_run_of_nothing_still_has_a_story() -> None:
    told = story(summarise([]))
    assert told[0].startswith("0 learners made 0 steps")
    assert any("no round was committed" in sentence for sentence in told)


def test_a_run_without_a_step_asks_for_the_call(events: list[Event]) -> None:
    summary = summarise(events)
    assert describe_no_rounds(summary) == ""
    idle = {**summary, "rounds": 0, "tokens": {**summary["tokens"], "computed": 0}}
    asked = "no learner made a step: does the script call learner.step() after every optimizer step?"
    assert describe_no_rounds(idle) == asked
    assert asked in " ".join(story(idle, events))
    assert describe_no_rounds({**summary, "rounds": 0}).startswith("no round was committed")


def test_a_run_that_ends_with_broken_numbers_failed(events: list[Event]) -> None:
    summary = summarise(events)
    assert find_shortfall(summary, events) == ""
    alarm = {**events[-1], "kind": "alarm", "about": "numbers", "text": "no number is finite", "over": False}
    assert find_shortfall(summary, [*events, alarm]) == "the run ended while no number is finite"
    assert find_shortfall(summary, [*events, alarm, {**alarm, "over": True}]) == ""
    assert find_shortfall({**summary, "rounds": 0}, events).startswith("no round was committed")


def test_the_last_sample_is_the_newest(events: list[Event]) -> None:
    assert last_sample(events) == "last"
    assert last_sample([]) is None


def test_only_kills_that_were_planned_are_called_kills(events: list[Event]) -> None:
    """A kill -9 from outside is told with the exit: beside it, 'kills 0' would be wrong."""
    summary, told = summarise(events), []
    for kills in (1, 0):
        console = Console(width=100, file=StringIO())
        print_closing(console, summary | {"kills": kills, "restarts": 1}, [])
        told.append(console.file.getvalue())  # type: ignore[attr-defined]
    assert "1 (1 planned kill)" in told[0] and "kill" not in told[1] and "restarts" in told[1]


def test_a_run_whose_numbers_were_not_finite_says_so(events: list[Event]) -> None:
    events = [event for event in events if event["kind"] not in ("lost", "left", "killed")]
    text = "the numbers of every learner are not finite: look at the data or lower the learning rate"
    events[-3:-3] = [
        {"at": 1009.0, "kind": "quarantined", "learner": "a", "incarnation": 1, "text": ""},
        {"at": 1009.1, "kind": "alarm", "over": False, "about": "numbers", "text": text},
        {"at": 1020.0, "kind": "score", "round": 8, "loss": None, "not_finite": True, "text": ""},
    ]
    tokens = {"computed": 240, "merged": 60, "dropped": 0, "lost": 180, "in_flight": 0}
    events[-1] |= {"tokens": tokens, "dropped_by_cause": {"overlap": 0, "missed": 0, "crash": 180}}
    told = story(summarise(events), events)
    assert any("75 % were lost in quarantine" in one for one in told), told
    assert (
        "Validation loss of the global model went from 5.50 to one that is not finite; the lowest was 2.25 at round 7 "
        "(atoll export --best RUN FILE)."
    ) in told
    assert f"{WARNING}the validation loss was not finite at the end." in told
    assert told[-1] == f"{WARNING}{text}."
    over = {"at": 1009.3, "kind": "alarm", "over": True, "about": "numbers", "text": "finite again"}
    assert story(summarise(events), [*events, over])[-1] == f"{WARNING}for a while: {text}."
    died = {"at": 1009.3, "kind": "lost", "learner": "b", "incarnation": 2, "reason": "nothing heard", "text": ""}
    both = [*events[:-1], died, events[-1]]
    assert any("75 % were lost with a process or in quarantine" in one for one in story(summarise(both), both))


def test_the_best_model_is_not_offered_where_an_evaluator_by_hand_keeps_it(events: list[Event]) -> None:
    summary = summarise(events) | {"validation_loss_end": 3.0}
    assert "round 7 (atoll export --best RUN FILE)." in " ".join(story(summary, events))
    by_hand = [event for event in events if event["kind"] != "started"]
    place = f"atoll-learners/{summary['run']}/evaluator or its --folder"
    assert f"round 7 (kept where its evaluator runs, in {place})." in " ".join(story(summary, by_hand))


def test_what_carry_drops_is_not_called_an_adoption(events: list[Event]) -> None:
    summary = summarise(events)
    summary["settings"]["adopt"] = ""
    told = " ".join(story(summary, events))
    assert "8 % were dropped when a learner took the run's parameters in place of its own (it began anew" in told
    assert "missed rounds" not in told


def test_a_run_of_which_not_all_could_be_judged_is_not_called_well() -> None:
    facts = {"records": 3447, "unjudged": 3329}
    assert conclude(VerifyReport(True, "", facts)).startswith("what could be judged is well: the last 118 of 3,447 ")
    assert conclude(VerifyReport(True, "", {**facts, "unjudged": 0})) == "all is well"


def test_an_evaluator_is_not_advised_for_a_tape(events: list[Event]) -> None:
    never = {"validation_loss_start": None, "validation_loss_end": None, "tape": "spot.tape"}
    by_hand = [event for event in events if event["kind"] != "started"]
    told = " ".join(story(summarise(events) | never, by_hand))
    assert "so nothing is known of its validation loss: a run under a tape has no evaluator." in told


def test_losses_that_were_never_finite_are_not_called_unscored(events: list[Event]) -> None:
    never = {"loss": None, "not_finite": True}
    events = [event | never if event["kind"] == "score" else event for event in events]
    told = " ".join(story(summarise(events), events))
    assert f"{WARNING}the validation loss was never finite." in told and "never scored" not in told
