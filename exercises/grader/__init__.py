"""The grader: runs answers, says what it saw in plain words, and remembers the points.

A check runs in the notebook (`check`) or in a fresh process (`refengine check`); both judge with the same code.
What an exercise needs for its tasks is exported here.
"""

from exercises.grader.hand_in import check
from exercises.grader.report import Report
from exercises.grader.task import Task, WrongAnswer

__all__ = ["Report", "Task", "WrongAnswer", "check"]
