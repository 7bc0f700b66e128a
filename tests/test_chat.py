"""A conversation keeps its cache between turns, and answers as a fresh one would."""

import pytest

from kvslim.cli.chat import Conversation
from kvslim.cli.session import Session
from kvslim.errors import InputError
from kvslim.integrations.transformers.loading import load_model
from kvslim.recipe import Recipe

TURNS = ("a b w1 w2", "w3 w4 a", "b b w5 w6 w7")


@pytest.fixture
def session(tiny_folder) -> Session:
    return Session(load_model(str(tiny_folder), device="cpu", progress=False), Recipe.parse("none"))


def talk_in(session: Session, **options) -> Conversation:
    options = {"first": [], "max_new_tokens": 8, "temperature": 0.0, "seed": None} | options
    return Conversation(session, session.new_cache(), **options)


def fresh_answers(session: Session, talk: Conversation) -> list[str]:
    """What a cold cache answers to each turn of a conversation."""
    answers = []
    for at in range(0, len(talk.turns), 2):
        ids = session.encode_messages([*talk.first, *talk.turns[: at + 1]])
        answers.append(
            session.reply(
                ids, session.new_cache(), max_new_tokens=8, temperature=0.0, seed=None, on_text=lambda text: None
            ).text
        )
    return answers


def test_later_turns_feed_only_new_tokens_and_change_nothing(session):
    talk = talk_in(session, first=[{"role": "system", "content": "w9 w9"}])
    replies = [talk.say(text) for text in TURNS]
    assert replies[0].fed_tokens == replies[0].prompt_tokens
    for reply, text in zip(replies[1:], TURNS[1:], strict=True):
        # the new message with its frame, and at most the last token of the answer before, which was never fed
        assert reply.fed_tokens <= len(text.split()) + 5 < reply.prompt_tokens
    assert [reply.text for reply in replies] == fresh_answers(session, talk)


def test_a_template_that_rewrites_the_past_only_costs_what_it_rewrote(session):
    session.loaded.tokenizer.chat_template = (
        "user w0 {% for message in messages %}{% if loop.last or message.role == 'user' %}{{ message.role }} "
        "{{ message.content }} <end> {% endif %}{% endfor %}assistant "
    )  # earlier answers are dropped, as templates of reasoning models do
    talk = talk_in(session)
    replies = [talk.say(text) for text in TURNS]
    assert all(reply.fed_tokens < reply.prompt_tokens for reply in replies[1:])
    assert [reply.text for reply in replies] == fresh_answers(session, talk)


def test_reset_forgets(session):
    talk = talk_in(session)
    first = talk.say(TURNS[0])
    talk.reset()
    again = talk.say(TURNS[0])
    assert (again.text, again.fed_tokens) == (first.text, first.fed_tokens)


def test_a_full_context_is_refused_and_the_conversation_goes_on(session):
    talk = talk_in(session)
    talk.say(TURNS[0])
    with pytest.raises(InputError, match="context of tiny is 256"):
        talk.say("a " * 300)
    talk.say(TURNS[1])
    assert [turn["content"] for turn in talk.turns[::2]] == list(TURNS[:2])
    assert [turn["content"] for turn in talk.turns[1::2]] == fresh_answers(session, talk)


def test_an_answer_stops_at_the_end_of_the_context(session):
    talk = talk_in(session, max_new_tokens=1000)
    reply = talk.say("a " * 240)
    assert reply.prompt_tokens + len(reply.ids) <= 256


def test_a_broken_off_answer_leaves_the_conversation_as_it_was(session, monkeypatch):
    talk = talk_in(session)
    talk.say(TURNS[0])

    def stop(text: str) -> None:
        raise InputError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr("kvslim.cli.chat.write", stop)
        with pytest.raises(InputError, match="stopped"):
            talk.say(TURNS[1])
    talk.say(TURNS[2])
    assert [turn["content"] for turn in talk.turns[::2]] == [TURNS[0], TURNS[2]]
    assert [turn["content"] for turn in talk.turns[1::2]] == fresh_answers(session, talk)


def test_piped_input_answers_each_line(tiny_folder, monkeypatch, capsys):
    import io
    import sys

    from kvslim.cli import main

    monkeypatch.setattr(sys, "argv", ["kvslim", "chat", "-m", str(tiny_folder), "-n", "4"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("a b\n\n/stats\n/reset\nw1\n/exit\nnever read\n"))
    with pytest.raises(SystemExit) as stopped:
        main()
    output = capsys.readouterr()
    assert stopped.value.code == 0
    assert output.err.count("layers packed]") == 0
    assert output.err.count("of the prompt's tokens were new]") == 2
    assert "layers packed  2 of 2" in output.err
    assert "[forgotten]" in output.err
