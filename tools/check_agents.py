"""Test packages for agents against `quire serve`, each in a separate process.

`python tools/check_agents.py [DIRECTORY]` installs them into separate virtual environments below DIRECTORY, which is
.venv-agents by default. The model is the embedded one, which cannot converse, so tool calls are required and a grammar
produces them. Everything is local.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

from quire_bench.server.process import server

ROOT = Path(__file__).parent.parent
# By environment: packages that conflict with the others have a separate one.
PACKAGES = {
    "agents": [
        "openai==3.3.0",
        "anthropic==2.12.0",
        "ollama==0.6.3",
        "litellm==1.83.0",
        "langchain-openai==1.7.3",
        "langgraph==1.2.22",
        "instructor==1.17.0",
        "pydantic-ai-slim[openai]==2.38.0",
        "openai-agents==0.24.0",
    ],
    "llama-index": ["llama-index-llms-openai-like==0.8.1", "llama-index-core==0.14.25"],
}
MODEL = "quire-embedded"
SECONDS = 120  # limit of each program
TEMPLATE = """{% for tool in tools or [] %}# {{ tool | tojson }}
{% endfor %}{% for m in messages %}# {{ m.role }}: {{ m.content }}
{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}"}</tool_call>
{% endfor %}{% endfor %}{% if add_generation_prompt %}def answer():
{% endif %}"""
# The beginning of each program: the server's address, and a function to offer. The program prints its result.
HEAD = """
import asyncio, json, sys
url, model = sys.argv[1:]
asked = [{"role": "user", "content": "what time is it"}]
zone = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"],
        "additionalProperties": False}
clock = {"type": "function", "function": {"name": "clock", "description": "The time.", "parameters": zone}}
"""
PROGRAMS = {
    "openai": """
from openai import OpenAI
client = OpenAI(base_url=url + "/v1", api_key="none")
said = client.chat.completions.create(
    model=model, messages=asked, tools=[clock], tool_choice="required", parallel_tool_calls=False, max_tokens=60)
call = said.choices[0].message.tool_calls[0]
assert json.loads(call.function.arguments)["zone"] in ("UTC", "CET")
after = [*asked, said.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "noon"}]
pieces = list(client.chat.completions.create(model=model, messages=after, tools=[clock], max_tokens=8, stream=True))
answer = client.responses.create(model=model, input="hello", max_output_tokens=8)
vectors = client.embeddings.create(model=model, input=["a", "b"]).data
print(call.function.name, len(pieces), "pieces", answer.status, len(vectors), "vectors")
""",
    "anthropic": """
from anthropic import Anthropic
client = Anthropic(base_url=url, api_key="none")
offered = {"name": "clock", "description": "The time.", "input_schema": zone}
said = client.messages.create(
    model=model, max_tokens=60, messages=asked, tools=[offered],
    tool_choice={"type": "any", "disable_parallel_tool_use": True})
call = next(block for block in said.content if block.type == "tool_use")
with client.messages.stream(model=model, max_tokens=8, messages=asked) as stream:
    text = "".join(stream.text_stream)
counted = client.messages.count_tokens(model=model, messages=asked).input_tokens
print(said.stop_reason, call.name, call.input, repr(text), counted, "tokens")
""",
    "ollama": """
from ollama import Client
client = Client(host=url)
said = client.chat(model=model, messages=asked, options={"num_predict": 8})
lines = list(client.generate(model=model, prompt="import os", stream=True, options={"num_predict": 8}))
formed = client.chat(model=model, messages=asked, format=zone, options={"num_predict": 40}).message.content
print(repr(said.message.content), len(lines), "lines", json.loads(formed), [one.model for one in client.list().models])
""",
    "litellm": """
import litellm
litellm.suppress_debug_info = True
common = {"model": "openai/" + model, "api_base": url + "/v1", "api_key": "none", "messages": asked}
said = litellm.completion(**common, tools=[clock], tool_choice="required", max_tokens=60)
pieces = list(litellm.completion(**common, stream=True, max_tokens=8))
try:
    litellm.completion(**common | {"messages": [{"role": "user", "content": "word " * 4000}]})
except litellm.ContextWindowExceededError as error:
    print(said.choices[0].message.tool_calls[0].function.name, len(pieces), "pieces", type(error).__name__)
""",
    "litellm, ollama_chat": """
import litellm
litellm.suppress_debug_info = True
common = {"model": "ollama_chat/" + model, "api_base": url, "temperature": 0, "max_tokens": 8}
said = litellm.completion(**common, messages=asked).choices[0].message.content
pieces = [one.choices[0].delta.content or "" for one in litellm.completion(**common, messages=asked, stream=True)]
assert "".join(pieces) == said
async def streamed():
    answer = await litellm.acompletion(**common, messages=asked, stream=True)
    return "".join([one.choices[0].delta.content or "" async for one in answer])
assert asyncio.run(streamed()) == said
form = {"type": "json_schema", "json_schema": {"name": "zone", "schema": zone}}
parsed = json.loads(litellm.completion(**common | {"max_tokens": 40}, messages=asked, response_format=form)
                    .choices[0].message.content)
called = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": json.dumps(parsed)}}
after = [*asked, {"role": "assistant", "content": "", "tool_calls": [called]},
         {"role": "tool", "tool_call_id": "a", "content": "noon"}]
answer = litellm.completion(**common, messages=after, tools=[clock], num_ctx=2048, repeat_last_n=64, mirostat=0)
print(repr(said), len(pieces), "pieces", parsed, answer.choices[0].finish_reason)
""",
    "langchain-openai": """
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
@tool
def clock(zone: str) -> str:
    "The time."
    return "noon"
chat = ChatOpenAI(base_url=url + "/v1", api_key="none", model=model, max_tokens=60)
call = chat.bind_tools([clock], tool_choice="required", parallel_tool_calls=False).invoke("the time").tool_calls[0]
shaped = chat.with_structured_output(zone | {"title": "zone"}).invoke("the time")
print(call["name"], shaped, len(list(chat.stream("hello"))), "pieces")
""",
    "langgraph": """
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
@tool
def clock(hour: bool) -> str:
    "The time."
    return "noon"
chat = ChatOpenAI(base_url=url + "/v1", api_key="none", model=model, max_tokens=60)
calls = chat.bind_tools([clock], tool_choice="required", parallel_tool_calls=False)
graph = StateGraph(MessagesState)
graph.add_node("ask", lambda state: {"messages": calls.invoke(state["messages"])})
graph.add_node("call", ToolNode([clock]))
graph.add_node("say", lambda state: {"messages": chat.invoke(state["messages"])})
for pair in (("__start__", "ask"), ("ask", "call"), ("call", "say"), ("say", "__end__")):
    graph.add_edge(*pair)
found = graph.compile().invoke({"messages": asked})["messages"]
assert found[2].content == "noon"
print([one.type for one in found])
""",
    "instructor": """
import instructor
from openai import OpenAI
from pydantic import BaseModel
class Yes(BaseModel):
    sure: bool
client = instructor.from_openai(OpenAI(base_url=url + "/v1", api_key="none"), mode=instructor.Mode.TOOLS)
print(client.chat.completions.create(model=model, response_model=Yes, messages=asked, max_tokens=60))
""",
    "pydantic-ai": """
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
class Yes(BaseModel):
    sure: bool
made = OpenAIChatModel(model, provider=OpenAIProvider(base_url=url + "/v1", api_key="none"))
print(Agent(made, output_type=Yes, model_settings={"max_tokens": 60}).run_sync("is it noon").output)
""",
    "openai-agents": """
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
set_tracing_disabled(True)
@function_tool
def clock(hour: bool) -> str:
    "The time."
    return "noon"
made = OpenAIResponsesModel(model=model, openai_client=AsyncOpenAI(base_url=url + "/v1", api_key="none"))
agent = Agent(name="a", model=made, tools=[clock], tool_use_behavior="stop_on_first_tool",
              model_settings=ModelSettings(tool_choice="required", max_tokens=60, parallel_tool_calls=False))
found = Runner.run_sync(agent, "the time", max_turns=3)
print([type(item).__name__ for item in found.new_items])
""",
    "llama-index": """
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
def clock(hour: bool) -> str:
    "The time."
    return "noon"
tool = FunctionTool.from_defaults(clock)
common = {"model": model, "api_base": url + "/v1", "api_key": "none", "context_window": 1024, "max_tokens": 60,
          "temperature": 0}
llm = OpenAILike(**common, is_chat_model=True, is_function_calling_model=True)
user = ChatMessage(role="user", content="the time")
said = llm.chat_with_tools([tool], chat_history=[user], tool_required=True, allow_parallel_tool_calls=False)
[call] = llm.get_tool_calls_from_response(said)
noon = tool(**call.tool_kwargs).content
result = ChatMessage(role="tool", content=noon, additional_kwargs={"tool_call_id": call.tool_id})
after = llm.chat([user, said.message, result]).message.content
found = llm.predict_and_call([tool], user_msg=user, tool_required=True, allow_parallel_tool_calls=False)
pieces = list(llm.stream_chat([user]))
assert pieces[-1].message.content == "".join(one.delta for one in pieces) == llm.chat([user]).message.content
calling = list(llm.stream_chat_with_tools([tool], chat_history=[user], tool_required=True))
assert llm.get_tool_calls_from_response(calling[-1])[0].tool_name == "clock"
text = OpenAILike(**common).complete("import os").text
print(call.tool_name, found.response, len(pieces), "pieces", len(after), len(text), "characters")
""",
}


def main() -> int:
    """Run all programs. Return 1 if one of them failed."""
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".venv-agents").absolute()
    pythons = {name: install(directory / name, packages) for name, packages in PACKAGES.items()}
    failed = False
    with TemporaryDirectory() as made:
        template = Path(made) / "template.jinja"
        template.write_text(TEMPLATE)
        options = ["--chat-template", str(template), "--tool-call-parser", "hermes", "--ollama"]
        with server(*options) as process:
            for name, program in PROGRAMS.items():
                found = run(pythons.get(name, pythons["agents"]), HEAD + program, process.url)
                failed |= found.returncode != 0
                said = found.stdout.strip() if found.returncode == 0 else f"FAILED: {found.stderr[-1500:]}"
                print(f"{name:20s} {said}", flush=True)
    return int(failed)


def install(directory: Path, packages: list[str]) -> Path:
    """Install packages into an environment. Return the path of its Python."""
    python = directory / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    if not python.exists() or subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode != 0:
        venv.create(directory, with_pip=True, clear=True)
    subprocess.run([*pip, "install", "--quiet", *packages], check=True)
    return python


def run(python: Path, program: str, url: str) -> subprocess.CompletedProcess[str]:
    """Run a program against a server."""
    nowhere = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    command = [str(python), "-c", program, url, MODEL]
    return subprocess.run(
        command, env=os.environ | nowhere, capture_output=True, text=True, check=False, timeout=SECONDS
    )


if __name__ == "__main__":
    sys.exit(main())
