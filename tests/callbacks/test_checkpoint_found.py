"""Finding what was saved, and what `resume=` takes."""
import re

import pytest

from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint, newest
from learner.callbacks.validate_every import ValidateEvery
from tests.helpers import raises
from tests.resume_helpers import noisy_learner, record, uninterrupted


def test_damaged_files_are_skipped(tmp_path):
    "The newest sound file is used; each damaged one is named"
    learn = noisy_learner(tmp_path)
    learn.fit(3, 1e-2, cbs=Checkpoint('5it', keep=None))
    folder = Checkpoint().folder(learn)
    data = bytearray((folder/'run1_step15.ckpt').read_bytes())
    data[len(data)//2] ^= 4
    (folder/'run1_step15.ckpt').write_bytes(data)
    (folder/'run1_step10.ckpt').write_bytes(b'')

    with pytest.warns(UserWarning, match='skipped') as told: path, state = newest([folder], 0)

    assert path.name == 'run1_step5.ckpt' and state['counters']['n_step'] == 5
    assert [re.search(r'run1_step\d+', str(w.message))[0] for w in told] == ['run1_step15', 'run1_step10']


def test_a_script_of_several_fits(tmp_path):
    "Each fit of a script finds its own file: those before are over, those after start anew"
    def script(learn, *cbs):
        for n in (1, 2, 1): learn.fit(n, 1e-2, cbs=[Checkpoint('2it'), *cbs], resume=True)
    whole = noisy_learner(tmp_path/'whole')
    script(whole)
    for at in (3, 9, 12, 16):
        learn = noisy_learner(tmp_path)
        kill = Callback(after_batch=lambda cb, at=at: cb.training and cb.learn.n_step == at and _raise())
        with pytest.raises(KeyboardInterrupt): script(learn, kill)

    learn = noisy_learner(tmp_path)
    script(learn)

    assert learn.final_hash == whole.final_hash and record(learn) == record(whole)
    assert learn.n_fit == 3

def _raise(): raise KeyboardInterrupt


def test_resume_without_a_checkpoint_callback(tmp_path):
    "resume=True needs a Checkpoint, whose folder is looked into; a missing file is an error"
    learn = noisy_learner(tmp_path)

    with pytest.raises(ValueError, match='no Checkpoint'): learn.fit(1, resume=True)
    with pytest.raises(FileNotFoundError, match='nowhere'): learn.fit(1, resume=tmp_path/'nowhere.ckpt')


def test_resume_from_a_file(tmp_path):
    "A file goes on too, whichever it is; or a folder"
    whole = uninterrupted(tmp_path, 2)
    learn = noisy_learner(tmp_path)
    learn.fit(2, 1e-2, cbs=Checkpoint('3it', keep=None))
    folder = Checkpoint().folder(learn)

    for path in (folder/'run1_step3.ckpt', str(folder/'run1_step6.ckpt'), folder):
        again = noisy_learner(tmp_path/'again')
        again.fit(2, 1e-2, resume=path)
        assert again.final_hash == whole.final_hash


def test_going_back_begins_a_new_run(tmp_path):
    "Gone on with from an older file, the later ones of the old run stay, and the new ones have the next number"
    learn = noisy_learner(tmp_path)
    learn.fit(3, 1e-2, cbs=Checkpoint('5it', keep=None))
    folder = Checkpoint().folder(learn)

    again = noisy_learner(tmp_path)
    again.fit(3, 1e-2, cbs=Checkpoint('5it', keep=1), resume=folder/'run1_step5.ckpt')

    names = sorted(p.name for p in folder.iterdir())
    assert names == [*(f'run1_step{n}.ckpt' for n in (10, 15, 5)), 'run2_step15.ckpt']
    assert newest([folder], 0)[0].name == 'run2_step15.ckpt' and again.final_hash == learn.final_hash


def test_nothing_to_go_on_with_is_said(tmp_path, capsys, monkeypatch):
    "The first call starts anew, and says so; later ones say where they go on"
    monkeypatch.setenv('LEARNER_DISPLAY', 'log')
    for _ in range(2): noisy_learner(tmp_path).fit(1, cbs=Checkpoint(), resume=True)

    said = capsys.readouterr().out.splitlines()
    assert said[0] == 'no checkpoint yet: the fit starts anew' and 'the fit was over after 5 steps' in said[1]


@pytest.mark.parametrize('every,nth', [('1ep', 2), ('1ep', 3), ('2it', 3), ('5it', 2)])
def test_an_error_in_a_validation_of_validate_every(tmp_path, every, nth):
    "All is saved as it was before that validation, which comes again when another process goes on"
    def fit(learn, *cbs, **kwargs):
        learn.fit(3, 1e-2, cbs=[ValidateEvery(every, first=False), Checkpoint(), *cbs], **kwargs)
        return record(learn), learn.final_hash
    expected, stops = fit(noisy_learner(tmp_path/'whole')), raises(ValueError('odd'), nth=nth)
    with pytest.raises(ValueError, match='odd'): fit(noisy_learner(tmp_path), Callback(before_validate=stops))

    assert fit(noisy_learner(tmp_path), resume=True) == expected
