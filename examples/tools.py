"""Tools: the model calls a Python function, and then answers with its result.

Serve a model whose chat template has tools, such as `quire serve Qwen/Qwen3-0.6B`, and run
`python examples/tools.py [http://127.0.0.1:8000/v1]`. Any OpenAI client works like this.
"""

from __future__ import annotations

import json
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "temperature",
        "description": "The temperature in a city now, in degrees Celsius.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def temperature(city: str) -> str:
    """Return a temperature. A real program would ask a weather service."""
    return f"{len(city)} degrees"


def main() -> None:
    """Ask, run the calls, and ask again with their results."""
    client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
    model = client.models.list().data[0].id
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Is it warm in Lisbon?"}]

    # "required" makes the model call something; with "auto" it decides itself. Arguments follow the schema.
    first = client.chat.completions.create(
        model=model, messages=messages, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    )
    answer = first.choices[0].message
    messages.append(answer.to_dict())  # type: ignore[arg-type]
    for call in answer.tool_calls or ():
        if call.type == "function":
            result = temperature(**json.loads(call.function.arguments))
            print(f"{call.function.name}({call.function.arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    last = client.chat.completions.create(model=model, messages=messages, max_completion_tokens=200)
    print(f"answer: {last.choices[0].message.content}")


if __name__ == "__main__":
    main()
