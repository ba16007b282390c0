"""Whatever happens, hedges stay within their share."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.hedging import BURST, MAX_MODELS, HedgeBudget, HedgeRules, Hedges


@given(
    share=st.floats(min_value=0.0, max_value=1.0),
    late=st.lists(st.booleans(), max_size=300),
)
def test_no_more_than_the_share_of_requests_is_hedged(share: float, late: list[bool]) -> None:
    budget, rules, hedged = HedgeBudget(), HedgeRules(1.0, share), 0
    for number, is_late in enumerate(late, 1):
        budget.came(rules)
        hedged += is_late and budget.take()
        assert hedged <= share * number + 1e-6


def test_after_a_quiet_time_a_few_may_follow_one_another_and_no_more() -> None:
    budget, rules = HedgeBudget(), HedgeRules(1.0, 0.05)
    for _ in range(10_000):
        budget.came(rules)
    assert sum(budget.take() for _ in range(100)) == BURST


def test_models_have_budgets_of_their_own_and_their_number_is_bounded() -> None:
    hedges = Hedges()
    hedges.of("a").came(HedgeRules(1.0, 1.0))
    assert hedges.of("a").take()
    assert not hedges.of("b").take()
    for number in range(2 * MAX_MODELS):
        hedges.of(str(number))
    assert len(hedges._budgets) <= MAX_MODELS
