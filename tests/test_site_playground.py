"""The memory playground in a real browser: its arithmetic against the package, and odd input."""

import itertools
import json

import pytest
import torch

from evolve.deltanet import recurrent_delta_rule
from evolve.gated_deltanet import recurrent_gated_delta_rule
from evolve.kda import recurrent_kda
from evolve.linear_attention import recurrent_linear_attention

LINEAR, DELTA, GATED, KDA = RULES = ("linear", "delta", "gated", "kda")
ARITHMETIC = """({rule, k, v, q, alpha, beta}) => {
  const tokens = k.map((_, t) => ({ k: k[t], v: v[t], beta: beta[t], alpha: alpha[t] }));
  const states = evolveMemory.run(rule, tokens, k[0].length, v[0].length);
  return { o: q.map((q, t) => evolveMemory.read(states[t + 1], q)), S: states.at(-1) };
}"""


def package(rule: str, q, k, v, alpha, beta) -> tuple[torch.Tensor, torch.Tensor]:
    """o [T, V] and the last state [K, V], by the package in float64 with scale 1. alpha: [T, K]."""
    q, k, v, alpha, beta = (torch.tensor(x, dtype=torch.float64) for x in (q, k, v, alpha, beta))
    q, k, v = (x[None, :, None] for x in (q, k, v))
    g, beta = alpha.log()[None, :, None], beta[None, :, None]
    options = {"scale": 1.0, "output_final_state": True}
    if rule == LINEAR:
        o, S = recurrent_linear_attention(q, k, v, **options)
    elif rule == DELTA:
        o, S = recurrent_delta_rule(q, k, v, beta, **options)
    elif rule == GATED:
        o, S = recurrent_gated_delta_rule(q, k, v, g[..., 0], beta, **options)
    else:
        o, S = recurrent_kda(q, k, v, g, beta, **options)
    return o[0, :, 0], S[0, 0]


def text_of(rule: str, T: int, K: int, V: int) -> dict:
    """Random tokens as lists; one decay a head where the rule has no other, none at all for two of them."""
    q, k, v = torch.randn(T, K), torch.randn(T, K), torch.randn(T, V)
    k = k / k.norm(dim=-1, keepdim=True)
    alpha = torch.rand(T, K) if rule == KDA else torch.rand(T, 1).expand(T, K)
    alpha = alpha if rule in (GATED, KDA) else torch.ones(T, K)
    beta = 2 * torch.rand(T)
    beta[: T // 4] = torch.tensor([0.0, 1.0, 2.0]).repeat(T)[: T // 4]
    made = {"q": q, "k": k, "v": v, "alpha": alpha, "beta": beta}
    return {name: x.double().tolist() for name, x in made.items()}


def close(got: list, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), expected, rtol=1e-12, atol=1e-12)


@pytest.fixture
def play(open_site):
    def opened(fragment="", **context):
        page = open_site(f"playground.html{fragment}", **context)
        page.wait_for_selector("#playground:not([hidden])")
        return page

    return opened


def part(page, name):
    return page.locator(f'[data-part="{name}"]')


def example(page, name):
    page.locator(f'[data-example="{name}"]').click()


def choose(page, rule):
    page.locator(f'input[name="pg-rule"][value="{rule}"]').check()


def state(page) -> list[list[float]]:
    cells = part(page, "state").locator("td").evaluate_all("cells => cells.map(c => Number(c.dataset.value))")
    return [cells[i : i + 6] for i in range(0, 36, 6)]


def errors(page) -> list[float]:
    return part(page, "read").locator("[data-error]").evaluate_all("x => x.map(c => Number(c.dataset.error))")


def count(page) -> int:
    return page.evaluate("evolvePlayground.model.tokens.length")


def tokens_of(page) -> list:
    return page.evaluate("evolvePlayground.model.tokens")


def write_own(page, key: str, value: str) -> None:
    if not part(page, "own-key").is_visible():
        page.locator("summary", has_text="pair of your own").click()
    part(page, "own-key").fill(key)
    part(page, "own-value").fill(value)
    page.get_by_role("button", name="write it").click()


def test_arithmetic_is_the_package_s(play, tmp_path):
    """The package writes cases and results to a file; the page computes the same numbers from it."""
    page, cases = play(), []
    for rule, (T, K, V) in itertools.product(RULES, [(1, 1, 1), (7, 3, 5), (40, 6, 6), (60, 16, 4)]):
        case = text_of(rule, T, K, V)
        o, S = package(rule, **case)
        cases.append(case | {"rule": rule, "expected": {"o": o.tolist(), "S": S.tolist()}})
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(cases))
    for case in json.loads(file.read_text()):
        got = page.evaluate(ARITHMETIC, case)
        close(got["o"], torch.tensor(case["expected"]["o"], dtype=torch.float64))
        close(got["S"], torch.tensor(case["expected"]["S"], dtype=torch.float64))


def test_what_is_shown_after_clicks_is_what_the_package_computes(play):
    page = play()
    for rule, keys in itertools.product(RULES, ("apart", "overlapping")):
        compare_after_clicks(page, rule, keys)


def compare_after_clicks(page, rule: str, keys: str) -> None:
    part(page, "clear").click()
    choose(page, rule)
    page.locator(f'input[name="pg-overlap"][value="{keys}"]').check()
    written = [(0, 0), (1, 1), (4, 5), (0, 3), (5, 2)]
    for k, v in written:
        page.get_by_role("button", name=f"Write value {'ABCDEF'[v]} under key {k + 1}").click()
    part(page, "pass").click()
    settings = page.evaluate(
        "({...evolvePlayground.model, KEYS: evolvePlayground.KEYS, V: evolvePlayground.VALUES})"
    )
    K, V = settings["KEYS"][keys], settings["V"]
    alpha = {GATED: [settings["alpha"]] * 6, KDA: settings["alphas"]}.get(rule, [1] * 6)
    k = [K[i] for i, _ in written] + [[0.0] * 6]
    v = [V[j] for _, j in written] + [[0.0] * 6]
    T = len(k)
    _, S = package(rule, q=k, k=k, v=v, alpha=[alpha] * T, beta=[settings["beta"]] * T)
    close(state(page), S)
    last = {i: V[j] for i, j in written}
    value = torch.tensor([last[i] for i in last], dtype=torch.float64)
    read = torch.tensor([K[i] for i in last], dtype=torch.float64) @ S
    close(errors(page), (read - value).norm(dim=-1) / value.norm(dim=-1))


def test_the_examples_show_what_the_page_says(play):
    page = play()
    example(page, "twice")
    assert errors(page) == pytest.approx([0, 0, 0], abs=1e-12)
    choose(page, LINEAR)
    assert errors(page)[0] == pytest.approx(1)
    example(page, "scratch")
    assert errors(page)[:3] == pytest.approx([0, 0, 0], abs=1e-12)
    assert min(errors(page)[3:]) > 0.7
    choose(page, GATED)
    assert min(errors(page)) > 0.3
    example(page, "crowd")
    choose(page, DELTA)
    before = errors(page)
    assert before[-1] == pytest.approx(0, abs=1e-12)
    assert before[0] > 0.3
    for k, v in zip(range(6), "ABCDEF"):
        page.get_by_role("button", name=f"Write value {v} under key {k + 1}").click()
    assert sum(errors(page)) < sum(before)


ODD_NUMBERS = {
    "": "the field is empty",
    "   ": "the field is empty",
    "NaN": "got NaN",
    "Infinity": "got Infinity",
    "1e999": "got 1e999",
    "-0.1": "got -0.1",
    "99999999999999999999999999": "got 99999999999999999999…",
    "one": "got one",
    "0x1": "got 0x1",
    "1e": "got 1e",
    "--1": "got --1",
    "<b>": "got <b>",
}


def test_odd_numbers_are_explained_and_lose_nothing(play):
    page = play()
    example(page, "scratch")
    before, tokens = state(page), count(page)
    for typed, message in ODD_NUMBERS.items():
        for field, still in (("#pg-beta", "1"), ("#pg-alpha-4", "0.5")):
            page.locator(field).fill("0.7")
            page.locator(field).fill(still)
            page.locator(field).fill(typed)
            alert = page.locator(f"{field}-alert").inner_text()
            assert message in alert
            assert f"Still in use: {still}." in alert
            assert page.locator(field).get_attribute("aria-invalid") == "true"
        assert (state(page), count(page)) == (before, tokens)
    page.locator("#pg-beta").press("Tab")  # the field goes back to what is in use and still says why
    assert page.locator("#pg-beta").input_value() == "1"
    assert page.locator("#pg-beta").get_attribute("aria-invalid") is None
    assert "Back to: 1." in page.locator("#pg-beta-alert").inner_text()
    page.locator("#pg-beta").fill("0,5")  # a decimal comma is fine
    assert page.locator("#pg-beta-alert").inner_text() == ""
    assert page.evaluate("evolvePlayground.model.beta") == 0.5


ODD_PAIRS = [
    ("", "1 2 3 4 5 6", "key must be 6 numbers, got 0"),
    ("1 2 3", "1 2 3 4 5 6", "key must be 6 numbers, got 3"),
    ("0 0 0 0 0 0", "1 2 3 4 5 6", "the key must have a number that is not 0"),
    ("1 2 NaN 4 5 6", "1 2 3 4 5 6", "number 3 of the key must be a number from -100 to 100, got NaN"),
    ("1 2 3 4 5 6", "1 2 3 4 5 1e300", "number 6 of the value must be a number from -100 to 100"),
]


def test_odd_pairs_are_explained_and_lose_nothing(play):
    page = play()
    before = state(page)
    for key, value, message in ODD_PAIRS:
        write_own(page, key, value)
        assert message in part(page, "own-alert").inner_text()
        wrong = "own-key" if "the key" in message or message.startswith("key") else "own-value"
        marked = page.locator("#playground [aria-invalid]").evaluate_all("x => x.map(e => e.dataset.part)")
        assert marked == [wrong]
        assert state(page) == before
    write_own(
        page, "\u22123 0 0 0 0 +4.", "-1; 2; 0; 0; 0; 100"
    )  # the minus sign that the page itself writes
    assert page.locator("#playground [aria-invalid]").count() == 0
    assert part(page, "own-alert").inner_text() == ""
    assert errors(page)[-1] == pytest.approx(0, abs=1e-12)


def test_ends_of_the_range(play):
    """Undo of nothing, clear twice, more tokens than fit: a message each, and the page lives on."""
    page = play("#rule=delta")
    part(page, "clear").click()
    part(page, "undo").click()
    assert "nothing to take back" in part(page, "status").inner_text()
    assert "Nothing is written yet" in part(page, "read").inner_text()
    page = play("#rule=delta&tokens=" + ";".join(["1A"] * 200))
    part(page, "pass").click()
    assert "at most 200 tokens" in part(page, "status").inner_text()
    assert count(page) == 200
    part(page, "undo").click()
    assert count(page) == 199


def test_everything_can_be_taken_back(play):
    page = play("#rule=kda&tokens=1A;2B")
    before = tokens_of(page)
    part(page, "clear").click()
    assert count(page) == 0
    part(page, "undo").click()
    assert tokens_of(page) == before
    example(page, "crowd")
    part(page, "pass").click()
    part(page, "undo").click()
    part(page, "undo").click()
    assert tokens_of(page) == before
    assert page.evaluate("evolvePlayground.model.rule") == "kda"
    page.get_by_role("button", name="six lifetimes").click()
    part(page, "undo").click()
    assert page.locator("#pg-alpha-6").input_value() == "0.8"
    part(page, "undo").click()  # before the changes that the page knows: the last token
    assert tokens_of(page) == before[:1]


def test_a_reload_shows_the_same(play):
    page = play()
    assert "#" not in page.url  # nothing is kept before something is changed
    example(page, "scratch")
    page.locator("#pg-alpha-3").fill("0.25")
    write_own(page, "1 2 0 0 0 0", "0.5 0 0 0 0 -1e-3")
    before, tokens = state(page), tokens_of(page)
    page.wait_for_url("**tokens=1A;*:0.5,*")
    page.reload()
    assert (state(page), tokens_of(page)) == (before, tokens)
    assert page.locator("#pg-alpha-3").input_value() == "0.25"
    assert page.locator('input[value="kda"]').is_checked()
    page.evaluate("location.hash = '#what-is-computed'")  # a heading is not a state
    assert (state(page), tokens_of(page)) == (before, tokens)
    page.evaluate("location.hash = '#rule=linear&tokens=1A%3B2B'")
    page.wait_for_function("evolvePlayground.model.tokens.length === 2")
    part(page, "undo").click()
    assert (state(page), tokens_of(page)) == (before, tokens)


ODD_ADDRESSES = {
    "#rule=": "rule must be one of linear, delta, gated, kda",
    "#rule=delta&keys=up": "keys must be one of apart, overlapping, got up",
    "#rule=delta&beta=3": "beta must be a number from 0 to 2, got 3",
    "#rule=kda&alphas=1,1": "decays must be 6 numbers, got 2",
    "#rule=kda&alphas=1,1,1,1,1,-1": "number 6 of the decays must be a number from 0 to 1, got -1",
    "#rule=delta&tokens=7A": "token 1 must be like 1A, got 7A",
    "#rule=delta&tokens=1A;0,0,0,0,0,0:1,1,1,1,1,1": "the key must have a number that is not 0",
    "#rule=delta&tokens=" + "-;" * 201: "tokens must be at most 200, got 201",
    "#rule=delta&tokens=%E0": "an escape in it is cut off",
}


@pytest.mark.parametrize("address", ODD_ADDRESSES)
def test_odd_addresses_are_explained(play, address):
    page = play(address)
    assert ODD_ADDRESSES[address] in part(page, "status").inner_text()
    assert count(page) == 6  # as at the start


def test_own_pairs_have_names_and_colours(play):
    """An own key that equals one of the board is that one; two different ones are told apart."""
    page = play("#rule=delta&tokens=1A;2B")
    for key in ("3 0 0 0 0 0", "1 1 0 0 0 0", "2 2 0 0 0 0", "0 0 0 0 1 1"):
        write_own(page, key, "1 0 0 0 0 0")
    assert part(page, "read").locator("tbody th").all_inner_texts() == ["key 1", "key 2", "own 1", "own 2"]
    lines = part(page, "curves").locator("path.pg-line:not(.pg-coming)")
    strokes = lines.evaluate_all("lines => lines.map(line => line.getAttribute('stroke'))")
    assert len(set(strokes)) == 4
    page.locator('input[value="overlapping"]').check()  # the keys of the board move: two more are different
    assert len(errors(page)) == 5


def test_colours_follow_the_scheme(play):
    page = play(color_scheme="light")
    read = """() => [...document.querySelectorAll('#playground :is(.pg-card, .pg-state td, .pg-line)')]
      .map(e => e.getAttribute('stroke') || getComputedStyle(e).backgroundColor)"""
    light = page.evaluate(read)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("document.documentElement.dataset.theme === 'dark'")
    page.wait_for_timeout(400)
    dark = page.evaluate(read)
    assert len(light) == len(dark) > 40
    assert all(one != other for one, other in zip(light, dark))


TARGETS = "#playground :is(button, label, input, summary)"
SMALL = """([targets, least]) => [...document.querySelectorAll(targets)].filter(e => {
  const box = (e.closest('label') ?? e).getBoundingClientRect();
  return box.width && (box.width < least || box.height < least);
}).map(e => e.outerHTML.slice(0, 120))"""


@pytest.mark.parametrize("width", [1280, 360])
def test_targets_are_large_enough(play, width):
    page = play("#rule=kda&tokens=1A", width=width)
    page.locator("summary", has_text="pair of your own").click()
    labels = "#playground label:not(:has(input))"  # words beside a field, not a target of their own
    page.evaluate("s => document.querySelectorAll(s).forEach(e => e.remove())", labels)
    assert page.evaluate(SMALL, [TARGETS, 24]) == []
    if width == 360:
        heights = part(page, "board").locator("button").evaluate_all("b => b.map(e => e.offsetHeight)")
        assert min(heights) >= 44


def test_keyboard_alone(play):
    page = play()
    part(page, "clear").focus()
    page.keyboard.press("Enter")
    page.locator('[data-part="board"] button[tabindex="0"]').focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowLeft", "ArrowLeft"):
        page.keyboard.press(key)
    page.keyboard.press("Space")
    assert page.evaluate("evolvePlayground.model.tokens") == [{"key": 2, "value": 5}]
    assert "value F under key 3" in part(page, "status").inner_text()
    assert page.locator('[data-part="board"] button[tabindex="0"]').count() == 1
    for key, label in (
        ("Home", "A under key 3"),
        ("End", "F under key 3"),
        ("Control+Home", "A under key 1"),
    ):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.ariaLabel").endswith(label)
    page.keyboard.press("Control+End")
    assert page.evaluate("document.activeElement.ariaLabel").endswith("F under key 6")
    page.locator('input[value="kda"]').focus()
    page.keyboard.press("ArrowUp")
    assert page.evaluate("evolvePlayground.model.rule") == "gated"


def test_motion_only_where_it_is_wanted(play):
    read = "getComputedStyle(document.querySelector('.pg-state td')).transitionDuration"
    assert play().evaluate(read) == "0.25s"
    assert play(reduced_motion="reduce").evaluate(read) == "0s"


def test_curves_say_what_they_show(play):
    page = play()
    example(page, "scratch")
    label = part(page, "curves").get_attribute("aria-label")
    assert "key 1 0.00, later 0.00" in label
    assert "key 6 0.75, later 1.00" in label
