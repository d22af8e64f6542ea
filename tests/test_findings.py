"""The limits and what is found beyond them: at both sides of each."""
import math

import pytest

from learner.findings import Seen, findings, limits

def found(**seen):
    return [(f.finding, f.where) for f in findings(Seen(**dict(n_batches=10, n_steps=10, loss=1.) | seen))]

def layers(*values): return {f'layer {i}': v for i, v in enumerate(values)}


def test_nothing_seen_is_nothing_found():
    "No measurement, no finding"
    assert findings(Seen()) == []

@pytest.mark.parametrize('gradients, pull, expected', [
    ((1., 1.1e-4), 1, []), ((1., .9e-4), 1, [('vanishing gradients', 'layer 1')]), ((1., 0.), 1, []),
    ((1., 1e-9), 101, [('exploding gradients', 'layer 0')]), ((1., 1.), 99, []),
    ((1., 1e-9, 1e-9, 1e-9), 1, [('vanishing gradients', 'layer 1, layer 2 and 1 more')]),
    ((1.,), math.nan, [('exploding gradients', 'layer 0')])])
def test_gradients(gradients, pull, expected):
    "By layer beside the largest; where they explode that alone is told; 0 is told as none at all"
    assert found(gradients=layers(*gradients), pull=layers(pull)) == expected

def test_exploding_outputs_are_told_in_place_of_their_gradients():
    "They are what the gradients come from"
    assert found(spread=101., pull=layers(1e6)) == [('exploding outputs', 'the last layer')]
    assert found(spread=99.) == []

@pytest.mark.parametrize('ratios, expected', [
    ((1e-3, 1e-3), []), ((9e-2, 9e-2), []), ((.11, .11), [('updates too large', 'most layers')]),
    ((1.1e-4, 1.1e-4), []), ((9e-5, 9e-5), [('updates too small', 'most layers')]),
    ((1.1, 1e-3, 1e-3), [('updates too large', 'layer 0')]), ((.9, 1e-3, 1e-3), []),
    ((.9e-6, 1e-3, 1e-2), [('updates too small', 'layer 0')]), ((1.1e-6, 1e-3, 1e-2), []),
    ((2., 2.), [('updates too large', 'most layers')]), ((0., 0.), [('updates too small', 'most layers')])])
def test_updates(ratios, expected):
    "The mean over layers, and single layers that are far out"
    assert found(ratios=layers(*ratios), gradients=layers(*[1.]*len(ratios))) == expected

def test_the_first_step_is_not_as_large_as_the_weights():
    "Later ones are small beside weights that it has blown up"
    told, = findings(Seen(first=layers(207.), ratios=layers(.06), gradients=layers(1.)))

    assert told.finding == 'updates too large' and told.measured == '6.0e-02 of the weights, the first 2.1e+02'
    assert found(first=layers(.9), ratios=layers(.06), gradients=layers(1.)) == []
    assert found(first=layers(.01, 2.), ratios=layers(.01, .01), gradients=layers(1., 1.)) == [
        ('updates too large', 'layer 1')]

def test_the_cause_is_told_and_not_its_consequences():
    "A layer without a usable gradient is not blamed for its updates; a rate too small not for the loss"
    assert found(ratios=layers(1e-3, 1e-9), gradients=layers(1., 1e-9)) == [('vanishing gradients', 'layer 1')]
    assert found(ratios=layers(1e-3, 0.), gradients=layers(1., 0.)) == []
    assert found(bad_loss=1, ratios=layers(5.), gradients=layers(1.)) == [('loss is not finite', 'batch 1')]
    assert found(zero_grad=['a'], loss=0., repeated=(0., 0.)) == []
    assert [*dict(found(ratios=layers(1e-7), gradients=layers(1.), repeated=(1., 1.)))] == ['updates too small']
    assert found(ratios=layers(1e-7), gradients=layers(1.), repeated=(1., 1.1))[1:] == [
        ('loss does not fall', 'one batch, 2 times')]

@pytest.mark.parametrize('dead, expected', [(.39, []), (.41, [('dead units', 'layer 0')]), (1., [])])
def test_dead_units(dead, expected):
    "A share of a layer; all of it is told as no gradient at all"
    assert found(dead=layers(dead)) == expected

@pytest.mark.parametrize('losses, expected', [((1., .998), False), ((1., .9995), True), ((-1., -1.1), False),
                                              ((-1., -.9), True), ((0., 0.), False), ((), False),
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
    "Columns of another size are named, the worst first; where most are, it is the whole input"
    def columns(n): return {f'x, column {i}': (100.+i, 1.) if i < n else (0., 1.) for i in range(10)}

    assert found(columns=columns(3), inputs=dict(x=(10.5, 30.))) == [
        ('inputs not normalised', 'x, column 2 and 2 more')]
    assert found(columns=columns(9), inputs=dict(x=(90., 30.))) == [('inputs not normalised', 'x')]
    assert found(columns=columns(1), inputs=dict(x=(1., 3.))) == [('inputs not normalised', 'x, column 0')]

@pytest.mark.parametrize('seen, expected', [
    (dict(no_grad=['a', 'b', 'c']), ('no gradient', 'a, b and 1 more')),
    (dict(zero_grad=['a']), ('gradient is 0', 'a')),
    (dict(hidden=['Net.layers[0]']), ('not registered', 'Net.layers[0]')),
    (dict(targets=(150., 77.)), ('targets not normalised', 'the targets')),
    (dict(targets=(math.nan, 1.), bad_loss=0), ('targets are not finite', 'the targets')),
    (dict(n_steps=0), ('no step', 'the optimizer')), (dict(alike=True), ('no variety in a batch', 'the targets')),
    (dict(bad_loss=0, inputs=dict(x=(math.nan, 1.))), ('inputs are not finite', 'x')),
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

def test_long_names_are_shortened():
    "So that a table shows them"
    names = [f'encoder.layers.{i}.self_attention.out_projection.weight' for i in range(3)]

    assert found(no_grad=names) == [('no gradient', 'encode…tion.weight, encode…tion.weight and 1 more')]
