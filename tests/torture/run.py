"""Kills trainings 200 times and more, in all cells, and prints what came of it: `make torture`, or this as a module.

A cell is workers × dtype × accumulation; in each of them all fits of script.py are killed, at most four times a
training. A mismatch is anything in the result of the training that is not, bit for bit, that of one left alone, a
damaged file, or a fit that went on before the last finished save. An exception is anything on stderr, or a hung
process. It takes some minutes; `python -m tests.torture.run SEED` draws other moments."""
import sys
from collections import Counter
from itertools import groupby, product
from time import perf_counter

from tests.torture.driver import torture_all
from tests.torture.script import Cell, fits, kits

n_kills = 4  # of each fit of a cell
cells = [Cell(*names) for names in product(('0', '2', 'persistent', 'changing'), ('fp32', 'bf16'), ('1', '3'), fits)]
cells += [Cell(*names) for names in product(('0', '2'), kits, ('1',), (*fits, 'own_plateau'))]


def row(names, reports):
    "A line of the table"
    sums = [sum(r.kills for r in reports), sum(r.lives for r in reports), sum(len(r.mismatches) for r in reports),
            sum(len(r.exceptions) for r in reports), f'{sum(r.seconds for r in reports):.0f}']
    return '| ' + ' | '.join(map(str, [*names, *sums])) + ' |'


def run(seed):
    "Print the table, and what went wrong; True if nothing did"
    start, reports, places = perf_counter(), [], Counter()
    print('| workers | dtype | batches a step | kills | lives | mismatches | exceptions | seconds |\n|' + ' --- |'*8)
    for names, some in groupby(zip(cells, torture_all(cells, n_kills, n_kills, seed)), key=lambda pair: pair[0][:3]):
        reports += (some := [r for _, r in some])
        print(row(names, some), flush=True)
    for r in reports: places += r.places
    print(row(['all', '', ''], reports))
    print(f'\nIn {perf_counter()-start:.0f} s. The last line before a kill was of: ' +
          ', '.join(f'{tag} {n}' for tag, n in places.most_common()))
    wrong = [text for r in reports for text in (*r.mismatches, *r.exceptions)]
    print(*wrong, sep='\n')
    return not wrong


if __name__ == '__main__': sys.exit(not run((sys.argv+['0'])[1]))
