"""What a file of the state tells of how it was made; and folders of checkpoints that have been moved."""
import json
import platform
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

import learner
from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.files import DamagedFile
from learner.meta import checkpoint_meta
from tests.helpers import synth_learner
from tests.resume_helpers import AskAt, noisy_learner, record, uninterrupted

user = {'dataset': 'v3', 'args': {'lr': .1, 'sizes': [1, 2]}, 'folder': Path('data'), 3: None}


def folder_of(learn): return Checkpoint().folder(learn)


# ---- what is there

@pytest.mark.parametrize('write', ['save_state', 'Checkpoint', 'best'])
def test_time_versions_and_what_the_user_wants_told(write, tmp_path):
    "Each file of the state has them, whoever writes it"
    learn = noisy_learner(tmp_path)
    learn.meta |= user
    learn.fit(1, cbs=Checkpoint(monitor='valid_loss') if write != 'save_state' else None)
    path = learn.save_state('s') if write == 'save_state' else folder_of(learn)/{
        'Checkpoint': 'run1_step5.ckpt', 'best': 'run1_best_valid_loss.ckpt'}[write]

    meta = checkpoint_meta(path)

    assert meta['user'] == user and {*meta} == {'time', 'versions', 'user', 'n_fit', 'epoch', 'n_step'}
    assert (meta['n_fit'], meta['n_step']) == (learn.n_fit-(write != 'save_state'), 5)
    assert meta['versions'] == dict(python=platform.python_version(), torch=torch.__version__,
                                    learner=learner.__version__)
    assert timedelta() <= datetime.now(UTC)-datetime.fromisoformat(meta['time']) < timedelta(hours=1)

def test_as_it_is_when_a_file_is_written(tmp_path):
    "What is told later in a fit is in the files that are written then"
    def tell(cb): cb.learn.meta['seen'] = cb.learn.n_step
    learn = noisy_learner(tmp_path, cbs=Callback(after_step=tell))

    learn.fit(1, cbs=Checkpoint('2it', keep=None))

    assert [checkpoint_meta(folder_of(learn)/f'run1_step{n}.ckpt')['user'] for n in (2, 4)] == [
        dict(seen=2), dict(seen=4)]

def test_files_without(tmp_path):
    "A file from before there was any, or of weights, has none; what is no file of ours is an error"
    learn = synth_learner(path=tmp_path)
    learn.fit(1)
    torch.save({'model': {}}, tmp_path/'x.ckpt')

    assert checkpoint_meta(learn.save('w')) == {} and checkpoint_meta(learn.save('v', with_opt=False)) == {}
    with pytest.raises(DamagedFile): checkpoint_meta(tmp_path/'x.ckpt')
    with pytest.raises(FileNotFoundError): checkpoint_meta(str(tmp_path/'y.ckpt'))

def test_another_process_reads_it(tmp_path):
    "It needs no Learner, and none of the classes that the file is of"
    class Mine(Callback):
        state = ('n',)
        n = 3
    learn = synth_learner(Mine, path=tmp_path)
    learn.meta['dataset'] = 'v3'
    code = 'import json, sys; from learner import checkpoint_meta; print(json.dumps(checkpoint_meta(sys.argv[1])))'

    out = subprocess.check_output([sys.executable, '-c', code, learn.save_state('s')], text=True)

    assert json.loads(out)['user'] == dict(dataset='v3')


# ---- what it decides: nothing

def test_it_is_no_part_of_the_hash():
    "Learners that differ in it alone train alike"
    one, other = synth_learner(), synth_learner()
    other.meta['dataset'] = 'v3'

    assert one.state_hash() == other.state_hash() and 'meta' not in other.state_dict()

def test_a_resume_with_another(tmp_path):
    "A fit goes on as it would have; what this script tells stays, and the rest comes from the file"
    whole = uninterrupted(tmp_path, 2)
    first = noisy_learner(tmp_path)
    first.meta |= dict(dataset='v3', host='a')
    with pytest.raises(KeyboardInterrupt): first.fit(2, 1e-2, cbs=[Checkpoint('2it'), AskAt(3)])
    learn = noisy_learner(tmp_path)
    learn.meta |= dict(host='b', more=1)

    learn.fit(2, 1e-2, cbs=Checkpoint('2it'), resume=True)

    assert learn.final_hash == whole.final_hash and record(learn) == record(whole)
    assert learn.meta == dict(dataset='v3', host='b', more=1)
    assert checkpoint_meta(folder_of(learn)/'run1_step10.ckpt')['user'] == learn.meta

def test_loading_a_state(tmp_path):
    "`load_state` brings it likewise"
    learn = synth_learner(path=tmp_path)
    learn.meta = dict(user)

    other = synth_learner(path=tmp_path).load_state(learn.save_state('s'))

    assert other.meta == user


# ---- what is refused

@pytest.mark.parametrize('meta, what', [
    ({'ok': 1, 'model': object()}, r"`learn.meta\['model'\]`, a `object`"),
    ({'args': {'f': [print]}}, r"`learn.meta\['args'\]`, a `dict`"), ([1], '`learn.meta` is a `list`')])
def test_what_no_file_can_hold(meta, what, tmp_path):
    "It is an error that names it: at the start of a fit with Checkpoint, and when a state is saved"
    learn = noisy_learner(tmp_path)
    learn.meta = meta

    with pytest.raises(TypeError, match=what): learn.fit(1, cbs=Checkpoint())
    assert learn.n_step == 0
    with pytest.raises(TypeError, match=what): learn.save_state('s')
    learn.fit(1)


# ---- folders that are moved

def moved(tmp_path):
    "A run that was stopped, whose folder then got another name; and the old one"
    old, new = tmp_path/'old-place', tmp_path/'new'
    first = noisy_learner(old)
    with pytest.raises(KeyboardInterrupt): first.fit(3, 1e-2, cbs=[
        Checkpoint('2it', keep=None, monitor='valid_loss'), AskAt(9)])
    old.rename(new)
    return old, new

def test_a_moved_folder_goes_on(tmp_path):
    "`resume=True` finds what is in the folder under its new name, and nothing is written to the old one"
    whole = uninterrupted(tmp_path, 3)
    old, new = moved(tmp_path)
    learn = noisy_learner(new)

    learn.fit(3, 1e-2, cbs=Checkpoint('2it', keep=None, monitor='valid_loss'), resume=True)

    assert learn.final_hash == whole.final_hash and record(learn) == record(whole) and not old.exists()
    assert (folder_of(learn)/'run1_step15.ckpt').exists()

def test_the_best_file_of_a_moved_folder(tmp_path):
    "A best file goes on too, and its weights can be loaded"
    whole = uninterrupted(tmp_path, 3)
    _, new = moved(tmp_path)
    learn = noisy_learner(new)
    best = folder_of(learn)/'run1_best_valid_loss.ckpt'

    learn.fit(3, 1e-2, resume=best)
    weights = noisy_learner(new).load(best.absolute(), with_opt=False)

    assert learn.final_hash == whole.final_hash and record(learn) == record(whole)
    assert not all(map(torch.equal, weights.model.parameters(), learn.model.parameters()))

def test_no_file_knows_its_place(tmp_path):
    "No folder is found among the bytes of any"
    _, new = moved(tmp_path)
    files = [p for p in new.rglob('*') if p.is_file()]

    assert len(files) > 3 and [p.name for p in files if any(
        name in p.read_bytes() for name in (b'old-place', str(tmp_path).encode()))] == []

def test_what_comes_during_a_fit_costs_no_weights(tmp_path):
    "A value that no file can hold is left out with a warning, if it was not there when the fit began"
    def tell(cb): cb.learn.meta['odd'] = object()
    learn = noisy_learner(tmp_path)

    with pytest.warns(UserWarning, match=r"saved without `learn.meta`: `learn.meta\['odd'\]`, a `object`"):
        learn.fit(1, cbs=[Checkpoint(), Callback(after_train=tell)])

    assert {*checkpoint_meta(folder_of(learn)/'run1_step5.ckpt')} == {'time', 'versions', 'n_fit', 'epoch', 'n_step'}
