"""An agent: a model calls tools until it has an answer: run `python examples/agent_loop.py`.

It asks a server at port 8000, such as that of the demo model, with OpenAI's client:

    python -m models.server --max-num-seqs 8 --max-num-batched-tokens 256

The demo model has read Shakespeare and nothing else: it does not know what a tool is. So the
server holds each answer to a call (`tool_choice="required"`), with arguments of the tool's schema,
and a tool is offered until it has been called. A model that was trained to call tools chooses by
itself with `tool_choice="auto"`. Needs `openai`, and for the server `pallas-paged[structured]`.
"""

from __future__ import annotations

import json

from openai import OpenAI

CITIES = ["Verona", "Mantua", "Padua"]


def weather(city: str) -> str:
    return {"Verona": "Fair, and hot.", "Mantua": "Thunder."}.get(city, "Fog.")


def lodging(city: str, nights: int) -> str:
    return f"An inn in {city}, {nights * 3} ducats."


TOOLS = {"weather": weather, "lodging": lodging}


def described(name: str, **properties: dict) -> dict:
    """Return a function with its arguments as the API has them."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


CITY = {"enum": CITIES}
DESCRIBED = [
    described("weather", city=CITY),
    described("lodging", city=CITY, nights={"enum": [1, 2, 3]}),
    described("answer", city=CITY, verdict={"enum": ["Go!", "Stay at home."]}),
]


def main(api: OpenAI) -> tuple[list[str], dict[str, str]]:
    """Return the names of the tools that were called, and the arguments of the answer."""
    (model,) = api.models.list().data
    messages: list[dict] = [{"role": "user", "content": "Whither shall I ride?"}]
    called: list[str] = []
    while True:
        offered = [one for one in DESCRIBED if one["function"]["name"] not in called]
        choice = api.chat.completions.create(
            model=model.id,
            messages=messages,
            tools=offered,
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
        ).choices[0]
        (call,) = choice.message.tool_calls
        name, arguments = call.function.name, json.loads(call.function.arguments)
        print(f"{name}({arguments})")
        if name == "answer":
            return called, arguments
        called.append(name)
        result = TOOLS[name](**arguments)
        print(f"  {result}")
        messages.append(choice.message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    main(OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none"))
