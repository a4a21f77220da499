from reft.core.text import counted, every, more


def test_one_takes_the_singular():
    assert [counted(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert [counted(n, "leaf", "leaves") for n in (1, 2)] == ["1 leaf", "2 leaves"]
    assert [every(n, "rank") for n in (1, 2)] == ["the one rank", "all 2 ranks"]
    assert [more(n, "leaf", "leaves") for n in (0, 1, 2)] == ["", " and 1 more leaf", " and 2 more leaves"]
