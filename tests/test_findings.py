"""The limits and what is found beyond them: at both sides of each."""
import math

import pytest

from learner.findings import Seen, findings, limits

def found(**seen): return [(f.finding, f.where) for f in findings(Seen(n_batches=10, **seen))]
def layers(*values): return {f'layer {i}': v for i, v in enumerate(values)}


def test_nothing_seen_is_nothing_found():
    "No measurement, no finding"
    assert findings(Seen()) == []

@pytest.mark.parametrize('gradients, norm, expected', [
    ((1., 1.1e-4), 1, []), ((1., .9e-4), 1, [('vanishing gradients', 'layer 1')]), ((1., 0.), 1, []),
    ((1., 1e-9), 1.1e3, [('exploding gradients', 'layer 0')]), ((1., 1.), .9e3, []),
    ((1., 1e-9, 1e-9, 1e-9), 1, [('vanishing gradients', 'layer 1, layer 2 and 1 more')]),
    ((math.nan,), math.nan, [('exploding gradients', 'layer 0')])])
def test_gradients(gradients, norm, expected):
    "By layer beside the largest; where they explode that alone is told; 0 is told as none at all"
    assert found(gradients=layers(*gradients), norm=norm) == expected

@pytest.mark.parametrize('ratios, expected', [
    ((1e-3, 1e-3), []), ((2.9e-2, 2.9e-2), []), ((3.1e-2, 3.1e-2), [('updates too large', 'most layers')]),
    ((3.4e-5, 3.4e-5), []), ((3.2e-5, 3.2e-5), [('updates too small', 'most layers')]),
    ((.11, 1e-3, 1e-3), [('updates too large', 'layer 0')]), ((.09, 1e-3, 1e-3), []),
    ((.9e-5, 1e-3, 1e-3), [('updates too small', 'layer 0')]), ((1.1e-5, 1e-3, 1e-3), []),
    ((.5, .5), [('updates too large', 'most layers')]), ((0., 0.), [('updates too small', 'most layers')])])
def test_updates(ratios, expected):
    "The mean over layers, and single layers that are far out"
    assert found(ratios=layers(*ratios), gradients=layers(*[1.]*len(ratios))) == expected

def test_the_cause_is_told_and_not_its_consequences():
    "A layer without a usable gradient is not blamed for its updates; a rate too small not for the loss"
    assert found(ratios=layers(1e-3, 1e-9), gradients=layers(1., 1e-9)) == [('vanishing gradients', 'layer 1')]
    assert found(ratios=layers(1e-3, 0.), gradients=layers(1., 0.)) == []
    assert found(ratios=layers(.5), gradients=layers(1.), norm=1e4) == [('exploding gradients', 'layer 0')]
    assert [*dict(found(ratios=layers(1e-7), gradients=layers(1.), repeated=(1., 1.)))] == ['updates too small']
    assert found(ratios=layers(1e-7), gradients=layers(1.), repeated=(1., 1.1))[1:] == [
        ('loss does not fall', 'one batch, 2 times')]

@pytest.mark.parametrize('dead, expected', [(.39, []), (.41, [('dead units', 'layer 0')]), (1., [])])
def test_dead_units(dead, expected):
    "A share of a layer; all of it is told as no gradient at all"
    assert found(dead=layers(dead)) == expected

@pytest.mark.parametrize('losses, expected', [((1., .998), False), ((1., .9995), True), ((-1., -1.1), False),
                                              ((-1., -.9), True), ((0., 0.), True), ((), False),
                                              ((1., math.nan), True)])
def test_one_batch_again_and_again(losses, expected):
    "The loss falls by a thousandth, whatever its sign"
    assert bool(found(repeated=losses)) is expected

@pytest.mark.parametrize('stats, expected', [
    ((0, 1), False), ((.3, .38), False), ((9.9, 9.9), False), ((10.1, 1), True), ((0, 10.1), True), ((-11, 1), True),
    ((0, .009), True), ((1, 0), False), ((math.nan, math.nan), True)])
def test_inputs(stats, expected):
    "Mean and deviation of the whole; what is constant is no matter of scale"
    assert bool(found(inputs=dict(x=stats))) is expected

def test_columns_are_named_unless_most_are_odd():
    "One column of another size is named; where most are, it is the whole input"
    def columns(n): return {f'x, column {i}': (100., 1.) if i < n else (0., 1.) for i in range(10)}

    assert found(columns=columns(1), inputs=dict(x=(10.5, 30.))) == [('inputs not normalised', 'x, column 0')]
    assert found(columns=columns(9), inputs=dict(x=(90., 30.))) == [('inputs not normalised', 'x')]
    assert found(columns=columns(1), inputs=dict(x=(1., 3.))) == [('inputs not normalised', 'x, column 0')]

@pytest.mark.parametrize('seen, expected', [
    (dict(no_grad=['a', 'b', 'c']), ('no gradient', 'a, b and 1 more')),
    (dict(left_out=['a']), ('not in the optimizer', 'a')), (dict(bad_loss=3), ('loss is not finite', 'batch 3')),
    (dict(single=['bn']), ('batch norm of one item', 'bn')), (dict(in_eval=['']), ('left in eval', 'the model')),
    (dict(last_of_one=True, has_batchnorm=True), ('batch norm of one item', "each epoch's last batch")),
    (dict(output='no', output_advice='try'), ('outputs do not fit the loss', 'the last layer')),
    (dict(waiting=.21), ('slow data', 'the training loader'))],
    ids=lambda o: ' '.join(o) if isinstance(o, dict) else '')
def test_plain_facts(seen, expected):
    "What needs no judgment"
    assert found(**seen) == [expected]

def test_small_shares_of_waiting_and_whole_epochs_are_fine():
    "At the other side of the limit"
    assert found(waiting=.19) == found(last_of_one=True) == found(has_batchnorm=True) == []

def test_every_limit_has_a_source():
    "One table: a number, and where it is from"
    assert all(limit.source and limit.value for limit in limits.values())
