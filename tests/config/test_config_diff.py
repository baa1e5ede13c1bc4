from titan_exp.config.schema.identity_keys import differences


def test_each_key_that_differs_has_a_line():
    old = {"a": {"b": 1, "c": [1], "gone": None}, "d": "x"}
    new = {"a": {"b": 2, "c": [1], "new": True}, "d": "x"}
    assert differences(old, new) == ["\n  a.b: 1 → 2", "\n  a.new: not there → true", "\n  a.gone: null → not there"]


def test_the_same_is_no_difference():
    assert differences({"a": {"b": {}}}, {"a": {"b": {}}}) == []
    assert differences(None, {"a": 1}) == []


def test_of_many_the_first_are_listed():
    found = differences({str(key): 0 for key in range(50)}, {str(key): 1 for key in range(50)})
    assert len(found) == 21
    assert found[-1] == "\n  and 30 more"


def test_an_empty_key_that_an_older_version_lacks_is_no_difference():
    assert differences({"a": 1}, {"a": 1, "parts": {}, "ramp": []}) == []
    assert differences({"parts": {"x": 1}}, {"parts": {}}) != []
    assert differences({"ramp": [1]}, {"ramp": []}) == ["\n  ramp: [1] → []"]
