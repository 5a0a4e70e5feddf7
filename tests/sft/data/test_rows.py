from __future__ import annotations

import base64
from typing import Any

import pytest

from landfall.errors import DataError
from landfall.sft.data.rows import Message, parse_row, with_image_paths
from tests.sft.data.conftest import chat

ONE_TURN = (Message("user", "q", False), Message("assistant", "a", True))
USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    "row",
    [
        chat("q", "a"),
        {"messages": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversation": [{"from": "user", "value": "q"}, {"from": "assistant", "value": "a"}]},
        {"query": "q", "response": "a"},
        {"instruction": "q", "input": "", "output": "a"},
        {"instruction": "q", "output": "a", "images": None, "videos": []},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, ANSWER]},
    ],
)
def test_row_of_any_known_form_becomes_the_same_conversation(row: dict[str, Any]) -> None:
    assert parse_row(row).messages == ONE_TURN


def test_alpaca_input_follows_its_instruction_on_a_new_line() -> None:
    row = {"instruction": "translate", "input": "chat", "output": "cat"}
    assert parse_row(row).messages[0].content == "translate\nchat"


def test_history_comes_before_query_and_response() -> None:
    row = {"history": [["1", "2"], ["3", "4"]], "query": "q", "response": "a", "system": "s"}
    contents = [message.content for message in parse_row(row).messages]
    assert contents == ["s", "1", "2", "3", "4", "q", "a"]


def test_system_beside_messages_is_put_first_unless_there_is_one() -> None:
    assert parse_row({**chat("q", "a"), "system": "s"}).messages[0] == Message("system", "s", False)
    own = [{"role": "system", "content": "own"}, USER, ANSWER]
    assert [m.content for m in parse_row({"messages": own, "system": "s"}).messages] == ["own", "q", "a"]


@pytest.mark.parametrize(
    "given", [{"images": ["a.png"]}, {"image": "a.png"}, {"images": "a.png"}, {"images": '["a.png"]'}]
)
def test_image_is_taken_from_any_of_its_fields(given: dict[str, Any]) -> None:
    assert parse_row(chat("<image>q", "a", **given)).images == ("a.png",)


def test_image_inside_the_content_takes_its_place() -> None:
    url = {"type": "image_url", "image_url": {"url": "b.png"}}
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "and"}, url]
    conversation = parse_row({"messages": [{"role": "user", "content": parts}, ANSWER]})
    assert conversation.messages[0].content == "<image>and<image>"
    assert conversation.images == ("a.png", "b.png")


def test_image_as_data_uri_or_bytes_is_decoded() -> None:
    uri = "data:image/png;base64," + base64.b64encode(b"png").decode()
    table_cell = {"bytes": b"png", "path": "a.png"}
    assert parse_row(chat("q", "a", images=[uri, table_cell, {"bytes": None, "path": "c"}])).images == (
        b"png",
        b"png",
        "c",
    )


def test_missing_tags_are_put_before_the_first_user_message() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "see <image>"}, ANSWER]
    row = {"messages": [*messages, USER, ANSWER], "images": ["1", "2", "3"]}
    assert [m.content for m in parse_row(row).messages] == ["s", "<image><image>see <image>", "a", "q", "a"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (["q", "a"], "a row must be an object, not a list"),
        ({}, "neither messages"),
        ({"text": "q"}, "the row has text"),
        ({"messages": []}, "there are no messages"),
        ({"messages": "hello"}, "`messages` must be a list, not text"),
        ({"messages": ["q"]}, "a message must be an object, not text"),
        ({"messages": [{"role": "tool", "content": "q"}, ANSWER]}, "unknown role 'tool'"),
        ({"messages": [{"content": "q"}, ANSWER]}, "unknown role 'None'"),
        ({"messages": [USER]}, "there is no answer"),
        ({"messages": [USER, ANSWER, USER]}, "there is no answer"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "must be text, not null"),
        ({"messages": [USER, {"role": "assistant"}]}, "must be text, not null"),
        ({"messages": [USER, {**ANSWER, "loss": False}]}, "every answer has loss false"),
        ({"messages": [USER, {**ANSWER, "loss": "no"}]}, "`loss` must be true or false"),
        ({"messages": [USER, {**ANSWER, "loss_scale": 0.5}]}, "`loss_scale`"),
        (
            {"messages": [USER, {"role": "system", "content": "s"}, ANSWER]},
            "a system message that is not the first",
        ),
        ({"query": "q", "response": 7}, "must be text, not a number"),
        ({"query": "q", "response": None}, "neither messages"),
        ({"query": "q", "response": "a", "history": [["1"]]}, "`history`"),
        (chat("<image> <image>", "a", images=["1"]), "2 <image> tags for 1 images"),
        (chat("<image>", "a"), "1 <image> tags for 0 images"),
        (chat("<|image_pad|>", "a"), "<|image_pad|> is written in a message"),
        (chat("q", "a", images=["1"], image="1"), "both `image` and `images`"),
        (chat("q", "a", images=[None]), "an image must be a path, not null"),
        (chat("q", "a", images=["https://a.b/c.png"]), "not fetched from the network"),
        (chat("q", "a", images=["data:image/png;base64,***"]), "no valid base64"),
        (chat("q", "a", videos=["1.mp4"]), "`videos` is not supported"),
        (chat("q", "a", tools=[{"name": "f"}]), "`tools` is not supported"),
        ({"messages": [ANSWER], "images": ["1"]}, "no user message to put them in"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}, ANSWER]}, "neither text nor image"),
        (
            {
                "messages": [{"role": "user", "content": [{"type": "image", "image": "1"}]}, ANSWER],
                "images": ["2"],
            },
            "both beside the messages and inside",
        ),
    ],
)
def test_row_that_can_not_be_trained_on_is_refused_with_the_reason(row: Any, reason: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_row(row)
    assert reason in caught.value.what


@pytest.mark.parametrize(
    "row",
    [
        chat("q", "a", images=["1", "2"], id=3),
        chat("q", "a", images=["1", "2"]) | {"images": '["1", "2"]'},
        {"messages": [{"role": "user", "content": [{"type": "image", "image": n} for n in "12"]}, ANSWER]},
    ],
)
def test_row_with_other_image_paths_is_otherwise_the_same(row: dict[str, Any]) -> None:
    moved = with_image_paths(row, lambda image: f"/data/{image!s}")
    assert parse_row(moved).images == ("/data/1", "/data/2")
    assert parse_row(moved).messages == parse_row(row).messages
    assert moved.get("id") == row.get("id")
