"""An agent on LangGraph, as its documentation writes one: `python looks_langgraph.py [stream]`."""

import json
import sys
from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def look(at: str) -> str:
    """Look somewhere."""
    return f"look {at}"


def main(*, streamed: bool) -> None:
    model = ChatOpenAI(model="policy", streaming=streamed).bind_tools([look])

    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_node("tools", ToolNode([look]))
    graph.add_edge(START, "answer")
    graph.add_conditional_edges("answer", tools_condition)
    graph.add_edge("tools", "answer")
    final = graph.compile().invoke({"messages": [("user", "go")]})
    print(json.dumps(float(final["messages"][-1].content == "ab.")))


main(streamed=sys.argv[1:] == ["stream"])
