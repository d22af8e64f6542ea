"""The events of a fit against traces recorded from fastai 2.8.12: a plain fit, and each cancel at each event."""
import json
from pathlib import Path

import pytest

from learner.callback import Callback
from learner.events import inner_events, scopes
from tests.helpers import Tracer, raises, synth_learner

vectors = json.loads((Path(__file__).parent/'data'/'fastai_events.json').read_text())
exceptions = {ex.__name__: ex for ex in scopes.values()}


def expected(case):
    "fastai's trace, with the faults mended that we do not share: a cancelled backward does not enter the step scope"
    events = case['events']
    if 'after_cancel_backward' not in events: return events
    i = events.index('after_cancel_backward')+2
    assert events[i:i+2] == ['before_step', 'after_step']
    return events[:i] + events[i+2:]


def test_plain_fit():
    "A fit without cancels fires fastai's events in fastai's order"
    learn = synth_learner(tracer := Tracer(cleanup=False))

    learn.fit(1)

    assert tracer.seen == ['after_create', *vectors['fit']]


@pytest.mark.parametrize('case', vectors['cancels'],
                         ids=lambda c: f"{c['exception']}-{c['raised_at']}-{c['while_training'] or 'valid'}")
def test_cancel(case):
    "Every cancel raised at every event ends what it ends in fastai; what no scope catches is an error that names it"
    ex, at = exceptions[case['exception']], case['raised_at']
    when = case['while_training'] if at in inner_events else None
    raiser = Callback(**{at: raises(ex, when)})
    raiser.order = 1000
    tracer = Tracer(cleanup=False)
    learn = synth_learner([tracer, raiser])

    if case['outcome'] == 'escapes fit':
        with pytest.raises(RuntimeError, match=f'{ex.__name__}, raised by `Callback` at `{at}`') as e: learn.fit(1)
        assert isinstance(e.value.__cause__, ex)
    else: learn.fit(1)

    assert tracer.seen[1:] == expected(case)


def test_all_traces_are_there():
    "No recorded trace is lost: one plain fit and 140 cancels"
    assert len(vectors['cancels']) == 140
