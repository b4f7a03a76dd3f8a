from __future__ import annotations

from atoll.launch.children import ScriptError, find_shared_error, read_script_error

LOG = """some output
Traceback (most recent call last):
  File "/srv/anna/train.py", line 40, in <module>
    main()
  File "/srv/anna/train.py", line 31, in main
    loss = model(batch)
           ^^^^^^^^^^^^
  File "/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 2812, in linear
    return torch._C._nn.linear(input, weight, bias)
RuntimeError: Error(s) in loading state_dict for Net:
\tMissing key(s) in state_dict: "head.weight".
courier: its training process died
"""


def test_the_last_line_of_a_traceback_and_the_scripts_own_line() -> None:
    error = read_script_error(LOG)
    assert error == ScriptError("RuntimeError", "Error(s) in loading state_dict for Net:", "/srv/anna/train.py", 31)
    assert error.summary == "RuntimeError: Error(s) in loading state_dict for Net: (train.py, line 31)"


def test_a_rank_is_no_part_of_the_line() -> None:
    """torch.distributed prints tracebacks so, once there is a process group."""
    of_rank = "\n".join(f"[rank12]: {line}" for line in LOG.splitlines()[:-1])
    error = read_script_error(of_rank)
    assert error is not None and error == read_script_error(LOG)


def test_of_several_tracebacks_the_last_one_counts() -> None:
    log = LOG + (
        "\nDuring handling of the above exception, another exception occurred:\n\n"
        'Traceback (most recent call last):\n  File "/x/mine.py", line 3, in <module>\n    raise KeyError\nKeyError\n'
    )
    error = read_script_error(log)
    assert error is not None and error.summary == "KeyError (mine.py, line 3)"


def test_a_script_that_python_cannot_read_has_no_frames() -> None:
    log = '  File "/x/mine.py", line 1\n    imprt torch\n          ^^^^^\nSyntaxError: invalid syntax\n'
    error = read_script_error(log)
    assert error is not None and error.summary == "SyntaxError: invalid syntax (mine.py, line 1)"


def test_where_every_frame_is_a_librarys_the_innermost_is_named() -> None:
    log = 'Traceback (most recent call last):\n  File "/usr/lib/python3.11/runpy.py", line 9, in run\nOSError: gone\n'
    error = read_script_error(log)
    assert error is not None and (error.file, error.line) == ("/usr/lib/python3.11/runpy.py", 9)


def test_a_log_without_a_traceback_tells_no_exception() -> None:
    assert read_script_error("") is None
    assert read_script_error("step 1\nKilled\n") is None
    assert read_script_error('  File "/x/mine.py", line 1\n    cut off') is None


def test_a_mistake_is_the_same_whatever_its_message_says() -> None:
    one = ScriptError("OSError", "learner-0.txt", "a.py", 3)
    other = ScriptError("OSError", "learner-1.txt", "a.py", 3)
    assert find_shared_error([one, other]) == one
    assert find_shared_error([one, ScriptError("OSError", "learner-0.txt", "a.py", 4)]) is None
    assert find_shared_error([one, None]) is None and find_shared_error([None, one]) is None
    assert find_shared_error([one]) == one, "one learner is every learner"
