"""Sides of a comparison that run in the process of the tests, in a fraction of the time of a new process."""

import pytest

from liger_ext.comparison import child, sides


class Inside(sides.Side):
    def __enter__(self):
        return self

    def _answer(self):
        return {}

    def _ask(self, question):
        if question == "step":
            return self.trainee.step()
        self.trainee = child.Trainee(question)
        return self.trainee.facts

    def end(self):
        self.trainee = None


@pytest.fixture
def inside(monkeypatch):
    monkeypatch.setattr(sides, "Side", Inside)
