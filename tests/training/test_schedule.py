"""The order in which steps come, as it is learned from trainings."""

from overspill.schedule import Line, Schedule

FORWARD = {1: 2, 2: 3, 3: 1}


def walked(schedule: Schedule[int], steps: list[int]) -> Line[int]:
    line = schedule.line()
    for step in steps:
        schedule.note(step, line)
    return line


def ahead(schedule: Schedule[int], line: Line[int], count: int) -> list[int]:
    return [step for step, _ in zip(schedule.upcoming(line), range(count), strict=False)]


def test_the_guess_holds_until_something_else_is_seen() -> None:
    schedule = Schedule(FORWARD)
    assert ahead(schedule, walked(schedule, [1]), 3) == [2, 3, 1]


def test_a_training_goes_forward_and_back() -> None:
    schedule = Schedule(FORWARD)  # -1 is the backward of 1
    line = walked(schedule, [1, 2, 3, -3, -2, -1] * 2 + [1])
    assert ahead(schedule, line, 5) == [2, 3, -3, -2, -1]
    schedule.note(2, line)
    schedule.note(3, line)
    assert ahead(schedule, line, 4) == [-3, -2, -1, 1]


def test_blocks_that_are_called_again_in_backward_are_told_from_their_forward() -> None:
    schedule = Schedule(FORWARD)
    line = walked(schedule, [1, 2, 3, 3, -3, 2, -2, 1, -1] * 2 + [1, 2])
    assert ahead(schedule, line, 7)[:5] == [3, 3, -3, 2, -2]


def test_nothing_is_expected_of_a_thread_that_has_done_nothing() -> None:
    schedule = Schedule(FORWARD)
    assert ahead(schedule, schedule.line(), 3) == []


def test_nothing_is_expected_behind_the_end_of_a_pass() -> None:
    schedule = Schedule(FORWARD)
    walked(schedule, [1, 2, 3])
    schedule.end_pass()
    assert ahead(schedule, walked(schedule, [1, 2]), 3) == [3]


def test_a_backward_goes_on_with_the_line_of_its_forward() -> None:
    schedule = Schedule(FORWARD)
    forwards = schedule.line()
    for _ in range(2):
        for step in [1, 2, 3]:
            schedule.note(step, forwards)
        for step in [-3, -2, -1]:  # whichever thread is in there
            schedule.note(step, forwards)
    schedule.note(1, forwards)
    assert ahead(schedule, forwards, 3) == [2, 3, -3]
