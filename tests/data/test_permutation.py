from collections import Counter

import pytest

from titan_exp.data.batch import Permutation


@pytest.mark.parametrize("size", [*range(1, 40), 1000])
def test_is_a_bijection(size: int):
    permutation = Permutation(size, "key", size)
    assert sorted(permutation[index] for index in range(size)) == list(range(size))


def test_every_order_is_about_equally_likely():
    orders = Counter(tuple(Permutation(3, key)[index] for index in range(3)) for key in range(3000))
    assert len(orders) == 6
    assert all(400 < count < 600 for count in orders.values())


def test_permutations_never_change():
    """A change would reorder the data of existing runs."""
    assert [Permutation(10, "order", 0, 0)[index] for index in range(10)] == [0, 6, 5, 7, 3, 8, 1, 2, 9, 4]
    assert Permutation(10**12, 1)[0] == 270368655988


def test_keys_of_the_same_letters_differ():
    first, second = Permutation(1000, 1, 11), Permutation(1000, 11, 1)
    assert [first[index] for index in range(20)] != [second[index] for index in range(20)]
