"""Tables: cursor, scroll and selection follow the key through updates."""

from __future__ import annotations

from typing import Any

from textual.app import App, ComposeResult

from console.tui.lines import fit, lay_out, plain_text, row_line, table_lines, whole_lines
from console.tui.widgets.rows import RowsView
from console.viewmodel.table import Column, Row, Table, Text

COLUMNS = (Column("name", "NAME", 10), Column("value", "VALUE", 6, "right", drop=1))


def table(*names: str) -> Table:
    return Table(
        COLUMNS, tuple(Row(n, (Text(n), Text("1")), {}, f"node/{n}") for n in names), "none"
    )


def numbered(count: int, first: int = 0) -> Table:
    return table(*(f"row-{i:03d}" for i in range(first, first + count)))


class OneTable(App[None]):
    def __init__(self, *, follow: bool = False) -> None:
        super().__init__(ansi_color=True)
        self.rows = RowsView(follow=follow)

    def compose(self) -> ComposeResult:
        yield self.rows


def shown(rows: RowsView) -> list[str]:
    return [plain_text(line) for line in rows.lines[1:]]


async def test_e18_an_update_keeps_cursor_and_scroll() -> None:
    app = OneTable()
    async with app.run_test(size=(40, 11)) as pilot:
        app.rows.set_table(numbered(60))
        await pilot.pause()
        app.rows.move(40)
        before = shown(app.rows)
        for _ in range(5):
            app.rows.set_table(numbered(60))
        assert shown(app.rows) == before
        assert app.rows.cursor is not None
        assert app.rows.cursor.key == "row-040"


async def test_rows_that_come_and_go_above_do_not_move_the_view() -> None:
    app = OneTable()
    async with app.run_test(size=(40, 11)) as pilot:
        app.rows.set_table(numbered(60, first=10))
        await pilot.pause()
        app.rows.select("row-040")
        before = shown(app.rows)
        app.rows.set_table(numbered(70))
        assert shown(app.rows) == before
        app.rows.set_table(numbered(50, first=20))
        assert shown(app.rows) == before


async def test_e16_rows_that_vanish_come_back_under_the_same_key() -> None:
    app = OneTable()
    async with app.run_test(size=(40, 11)) as pilot:
        app.rows.set_table(table("a", "b", "c"))
        await pilot.pause()
        app.rows.select("b")
        app.rows.set_table(table())
        assert app.rows.cursor is None
        assert "none" in shown(app.rows)[0]
        app.rows.set_table(table("a", "b", "c"))
        assert app.rows.cursor is not None


async def test_e17_the_cursor_is_clamped_and_enter_hits_the_row_shown() -> None:
    app = OneTable()
    async with app.run_test(size=(40, 11)) as pilot:
        app.rows.set_table(numbered(30))
        await pilot.pause()
        app.rows.move(25)
        app.rows.set_table(table("x", "y"))
        marked = [line for line in shown(app.rows) if line.startswith(">")]
        assert app.rows.cursor is not None
        assert marked == [f">{app.rows.cursor.key:<10}       1"]


async def test_a_tail_follows_until_one_scrolls_up() -> None:
    app = OneTable(follow=True)
    async with app.run_test(size=(40, 11)) as pilot:
        app.rows.set_table(numbered(30))
        await pilot.pause()
        app.rows.set_table(numbered(40))
        assert app.rows.cursor is not None
        assert app.rows.cursor.key == "row-039"
        app.rows.move(-5)
        app.rows.set_table(numbered(50))
        assert app.rows.cursor.key == "row-034"
        assert app.rows.num_below == 10
        app.rows.move_to_end(last=True)
        app.rows.set_table(numbered(60))
        assert app.rows.cursor.key == "row-059"


async def test_a_click_selects_and_a_second_one_opens() -> None:
    opened: list[str] = []

    class Opening(OneTable):
        def on_rows_view_opened(self, message: RowsView.Opened) -> None:
            opened.append(message.row.key)

    app = Opening()
    async with app.run_test(size=(40, 11)) as pilot:
        app.rows.set_table(table("a", "b", "c"))
        await pilot.pause()
        await pilot.click(RowsView, offset=(3, 2))
        assert app.rows.cursor is not None
        assert app.rows.cursor.key == "b"
        assert opened == []
        await pilot.click(RowsView, offset=(3, 2))
        await pilot.pause()
        assert opened == ["b"]


async def test_e30_equal_lines_are_not_drawn_again(monkeypatch: Any) -> None:
    app = OneTable()
    async with app.run_test(size=(40, 11)) as pilot:
        app.rows.set_table(table("a", "b", "c"))
        await pilot.pause()
        regions: list[Any] = []
        monkeypatch.setattr(app.rows, "refresh", lambda *r, **k: regions.extend(r))
        app.rows.set_table(table("a", "b", "c"))
        assert regions == []
        app.rows.set_table(table("a", "x", "c"))
        assert [region.y for region in regions] == [2]


class TestLayout:
    def test_columns_drop_in_their_order_and_never_wrap(self) -> None:
        made = table("node-1")
        assert len(lay_out(made, 30).columns) == 2
        assert len(lay_out(made, 8).columns) == 1
        assert plain_text(row_line(made, made.rows[0], 8)) == "node-1"

    def test_wide_characters_count_double(self) -> None:
        assert fit("節点", 6) == "節点  "
        assert fit("節点節点", 5) == "節点~"
        assert fit("abc", 5, "right") == "  abc"
        assert fit("abcdef", 1) == "a"


class TestWhole:
    COLUMNS = (
        Column("name", "NAME", 10),
        Column("gone", "GONE", 30, drop=1),
        Column("why", "VERDICT", 10, grow=True),
    )

    def of(self, gone: str, why: str) -> Table:
        return Table(self.COLUMNS, (Row("a", (Text("a"), Text(gone), Text(why, "warn"))),))

    def test_words_go_on_below_and_columns_without_room_after_their_label(self) -> None:
        lines = whole_lines(self.of("x" * 25, "breaks TTFT SLO by 2.9 ms"), 30)
        assert [plain_text(line) for line in lines] == [
            "NAME        VERDICT",
            "a           breaks TTFT SLO by",
            "            2.9 ms",
            "    GONE " + "x" * 25,
        ]
        assert lines[2][1].style == lines[1][-1].style

    def test_words_come_before_padding(self) -> None:
        narrow = whole_lines(self.of("", "nineteen letters it"), 31)
        assert plain_text(narrow[1]).endswith("nineteen letters it")
        assert "~" not in "".join(map(plain_text, narrow))

    def test_what_has_no_value_is_not_told(self) -> None:
        assert len(whole_lines(self.of("-", "short"), 20)) == 2

    def test_what_cannot_fit_shows_its_cut_in_a_list(self) -> None:
        lines = [plain_text(line) for line in table_lines(self.of("x" * 25, "y" * 30), 16)]
        assert all(len(line) <= 16 for line in lines)
        assert lines[1].endswith("~")
