"""An agent on LangGraph that shops: one node asks the model, another one calls its tool."""

from typing import Any

import openai
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from slipstream.common.records.trajectory import Task
from slipstream.envhub.shop.shop import ShopEnv


async def play(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    shop = ShopEnv(profile="small")
    seen = await shop.reset(Task(env="shop", split=task["split"], index=task["index"]))

    @tool
    async def act(action: str) -> str:
        """Do one action."""
        nonlocal seen
        if not seen.done:
            seen = await shop.step(action)
        return seen.messages[-1].content

    model = ChatOpenAI(model="policy", base_url=str(client.base_url), api_key=client.api_key).bind_tools([act])

    async def choose(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    def next_node(state: MessagesState) -> str:
        return END if seen.done else "choose"

    graph = StateGraph(MessagesState)
    graph.add_node("choose", choose)
    graph.add_node("tools", ToolNode([act]))
    graph.add_edge(START, "choose")
    graph.add_conditional_edges("choose", tools_condition)
    graph.add_conditional_edges("tools", next_node, ["choose", END])
    goal = seen.messages[-1].content
    await graph.compile().ainvoke({"messages": [("user", goal)]}, {"recursion_limit": 50})
    return seen.score
