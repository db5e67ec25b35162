// The viewer of a run. Text of models and environments is only ever set as text: there is no innerHTML here.
"use strict";

const STEPS_A_PAGE = 50;
const COLOURS = ["#cfe3f5", "#fbe0b8", "#d5edd8", "#ecd7f0", "#f8d3d0", "#d3ecec", "#e6e2c0", "#dcdfe4"];
const embedded = document.getElementById("pages") && JSON.parse(document.getElementById("pages").textContent);
const main = document.getElementById("main");
const report = document.getElementById("report"); // the first page
let run;

class Elsewhere extends Error {} // the reader has gone to another page meanwhile

async function ask(path, request) {
  const response = await fetch("/api/" + path, request);
  const found = await response.json();
  if (!response.ok) throw new Error(found.error);
  return found;
}

async function get(path) {
  if (embedded) {
    if (!Object.hasOwn(embedded, path)) throw new Error("this file does not contain " + path);
    return embedded[path];
  }
  const place = location.hash;
  try {
    return await ask(path);
  } finally {
    if (location.hash !== place) throw new Elsewhere();
  }
}

// Invisible characters, which could hide or reorder what is shown, are escaped.
function printable(text) {
  return text.replace(/[^\P{C}\n\t]|[\u2028\u2029]/gu, (c) => "\\u{" + c.codePointAt(0).toString(16) + "}");
}

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "colour") node.style.backgroundColor = value; // the page's policy allows no attribute `style`
    else node.setAttribute(name, printable(String(value)));
  }
  for (const child of children.flat()) {
    if (!unknown(child)) node.append(child instanceof Node ? child : printable(String(child)));
  }
  return node;
}

const unknown = (value) => value === null || value === undefined;
const link = (place, ...children) => el("a", { href: "#" + place }, ...children);
const number = (value, digits = 3) => (unknown(value) ? "" : Number(value).toFixed(digits));
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const yesOrNo = (value) => el("span", { class: value ? "yes" : "no" }, value ? "solved" : "not solved");
const words = (text, kind) => el("div", { class: "words " + kind }, text);
const kindOf = (turn) => (turn.valid_action ? "action" : "action invalid");

function facts(pairs) {
  const shown = pairs.filter(([, value]) => !unknown(value) && value !== "");
  return el("div", { class: "facts" }, shown.map(([name, value]) => el("div", {}, el("span", {}, name), value)));
}

function table(head, rows, kind = "") {
  const top = el("thead", {}, el("tr", {}, head.map((name) => el("th", {}, name))));
  return el("div", { class: "wide" }, el("table", { class: kind }, top, el("tbody", {}, rows)));
}

const cell = (...children) => el("td", {}, ...children);
const numberCell = (content) => el("td", { class: "number" }, content);

function meter(share) {
  if (unknown(share)) return el("span", {}, "");
  const fill = el("i");
  fill.style.width = 100 * Math.min(1, Math.max(0, share)) + "%";
  return el("span", {}, el("span", { class: "meter" }, fill), " " + number(share));
}

// `options` are pairs of a value and its text, or texts that are values too.
function choice(label, options, chosen, onChange) {
  const select = el("select", { "aria-label": label, onchange: () => onChange(select.value) });
  for (const option of options) {
    const [value, text] = Array.isArray(option) ? option : [option, option];
    select.append(el("option", { value }, text));
  }
  select.value = chosen;
  return el("label", {}, el("span", { class: "quiet" }, label + " "), select);
}

// Pages.

async function showSteps(first) {
  const count = run.steps.length;
  const newest = run.steps.map((_, place) => count - 1 - place).slice(first, first + STEPS_A_PAGE);
  const metrics = newest.length ? await get("metrics/" + run.steps[newest[0]]) : {};
  const rows = newest.map((place) => {
    const step = run.steps[place];
    const of = (name) => metrics[step]?.[name];
    return el("tr", {}, cell(link("steps/" + step, "step " + step)), cell(meter(of("produced/success"))),
      cell(meter(of("trained/success"))), numberCell(number(of("trained/reward"))), numberCell(number(of("lag/mean"), 2)));
  });
  const turn = (to, text) => (to >= 0 && to < count && to !== first ? link("from/" + to, text) : null);
  const field = el("input", { type: "number", min: run.steps[0], max: run.steps[count - 1], placeholder: "step" });
  const jump = el("form", { onsubmit: (event) => { event.preventDefault(); location.hash = "steps/" + field.value; } },
    field);
  main.replaceChildren(
    facts([["run", run.name], ["environment", run.env], ["archived steps", count], ["max_lag", run.max_lag]]),
    el("div", { class: "bar" }, turn(first - STEPS_A_PAGE, "newer"), turn(first + STEPS_A_PAGE, "older"), jump),
    table(["step", "success of finished episodes", "success of the batch", "reward of the batch", "lag"], rows));
}

const KINDS = {
  all: () => true,
  mixed: (group) => new Set(group.members.map((member) => member.success)).size === 2,
  "all solved": (group) => group.members.every((member) => member.success),
  "none solved": (group) => group.members.every((member) => !member.success),
};
const spread = (group) => Math.max(...group.returns) - Math.min(...group.returns);
const ORDERS = {
  "as trained": null,
  "most unequal": (one, other) => spread(other) - spread(one),
  "largest lag": (one, other) => (other.lag || 0) - (one.lag || 0),
  longest: (one, other) => Math.max(...other.members.map((m) => m.num_tokens)) - Math.max(...one.members.map((m) => m.num_tokens)),
};

function memberBox(place, member, group) {
  const gained = member.return - mean(group.returns);
  const side = gained > 1e-6 ? "above" : gained < -1e-6 ? "below" : "";
  const title = `member ${member.member}: return ${number(member.return)}, ${member.num_turns} turns, ` +
    `${member.num_tokens} tokens, lag ${member.lag}, ${member.stop_reason}, ${member.actor}`;
  return el("a", { href: `#${place}/members/${member.member}`, class: "member " + side, title }, number(member.return, 2));
}

async function showStep(step) {
  const page = await get("steps/" + step);
  const wanted = { text: "", kind: "all", order: "as trained" };
  const list = el("div", {});
  function draw() {
    const text = wanted.text.toLowerCase();
    const about = (group) => [group.task, ...group.members.flatMap((m) => [m.actor, m.stop_reason])].join("\n").toLowerCase();
    let groups = page.groups.filter((group) => KINDS[wanted.kind](group) && about(group).includes(text));
    if (ORDERS[wanted.order]) groups = [...groups].sort(ORDERS[wanted.order]);
    const rows = groups.map((group) => {
      const place = `steps/${step}/groups/${group.group_id}`;
      const boxes = group.members.map((member) => memberBox(place, member, group));
      return el("tr", {}, cell(link(place, "group " + group.group_id)), cell(group.task), numberCell(group.lag),
        cell(el("div", { class: "members" }, boxes)));
    });
    const found = el("p", { class: "quiet" }, `${groups.length} of ${page.groups.length} groups; each box is an ` +
      "episode with its return, green above the mean of its siblings and red below");
    list.replaceChildren(found, table(["group", "task", "lag", "returns by member"], rows));
  }
  const set = (name) => (value) => { wanted[name] = value; draw(); };
  const field = el("input", { placeholder: "task, actor or stop reason", oninput: () => set("text")(field.value) });
  const of = page.facts;
  main.replaceChildren(
    facts([["weights", of.policy_version], ["groups", of.num_groups], ["episodes", of.num_trajectories],
      ["success", number(of.trained_success)], ["reward", number(of.trained_reward)],
      ["lag, mean and largest", `${number(of.lag_mean, 2)}, ${of.lag_max}`],
      ["turns", number(of.turns_mean, 1)], ["sampled tokens", number(of.sampled_tokens_mean, 1)],
      ["valid actions", number(of.valid_actions)], ["cut by length", number(of.cut_by_length)],
      ["log-probability of a token", number(of.logprob_mean)]]),
    neighbours("steps/", run.steps, step, "step "),
    el("div", { class: "bar" }, field,
      choice("groups", Object.keys(KINDS), wanted.kind, set("kind")),
      choice("order", Object.keys(ORDERS), wanted.order, set("order"))),
    list);
  draw();
}

function neighbours(place, all, here, name) {
  const at = all.indexOf(here);
  const to = (other, arrow) => (other === undefined ? null : link(place + other, arrow[0] + name + other + arrow[1]));
  return el("div", { class: "bar" }, to(all[at - 1], ["\u2190 ", ""]), to(all[at + 1], ["", " \u2192"]));
}

function rewardText(rewards) {
  return Object.entries(rewards).map(([name, value]) => `${name} ${Number(value).toPrecision(3)}`).join(", ");
}

// The siblings as a tree: those that have done the same so far share a branch.
function tree(place, members, depth) {
  const branches = new Map();
  for (const member of members.filter((each) => each.turns.length > depth)) {
    const action = member.turns[depth].action;
    branches.set(action, [...(branches.get(action) || []), member]);
  }
  const forks = [...branches.values()].map((those) => {
    if (those.length === 1) {
      const rest = those[0].turns.slice(depth).map((turn) => words(turn.action, kindOf(turn)));
      return el("li", {}, rest, leaf(place, those[0]));
    }
    const earned = mean(those.map((member) => member.return));
    return el("li", {}, words(those[0].turns[depth].action, kindOf(those[0].turns[depth])),
      el("div", { class: "reward" }, `${those.length} members, mean return ${number(earned)}`), tree(place, those, depth + 1));
  });
  const ended = members.filter((each) => each.turns.length <= depth).map((member) => el("li", {}, leaf(place, member)));
  return el("ul", { class: "tree" }, forks, ended);
}

function leaf(place, member) {
  return el("div", { class: "leaf" }, link(`${place}/members/${member.member}`, "member " + member.member), " ",
    yesOrNo(member.success), ` return ${number(member.return)}`);
}

async function showGroup(step, groupId, as) {
  const place = `steps/${step}/groups/${groupId}`;
  const group = await get(place);
  const wanted = { order: "by member", prompts: "shown", as: as === "tree" ? "a tree" : "side by side" };
  const usual = mean(group.returns);
  const list = el("div", {});
  const set = (name) => (value) => { wanted[name] = value; draw(); };
  const mark = (better, worse, undo) => guarded(async () => {
    const body = JSON.stringify({ step, group_id: groupId, better, worse, undo });
    group.marks = (await ask("marks", { method: "POST", body, referrerPolicy: "same-origin" })).marks;
    draw();
  });
  // What people say of a member; a file cannot keep any more.
  const preferred = ({ member }) => [
    group.marks.filter(([better]) => better === member).map(([, worse]) => el("div", {}, `better than ${worse} `,
      embedded ? null : el("button", { onclick: () => mark(member, worse, true) }, "undo"))),
    embedded ? null : choice("better than", [["", ""], ...group.members.filter((other) => other.member !== member)
      .map((other) => [other.member, "member " + other.member])], "", (worse) => mark(member, Number(worse), false)),
  ].flat();
  function draw() {
    const members = [...group.members];
    if (wanted.order === "by return") members.sort((one, other) => other.return - one.return);
    if (wanted.as === "a tree") return list.replaceChildren(tree(place, members, 0));
    const heads = members.map((member) => el("div", {}, link(`${place}/members/${member.member}`, "member " + member.member),
      " ", yesOrNo(member.success), el("div", {}, `return ${number(member.return)} (${member.return >= usual ? "+" : ""}` +
        `${number(member.return - usual)} against the mean)`),
      el("div", { class: "reward" }, rewardText(member.rewards)),
      el("div", { class: "reward" }, `lag ${member.lag}, versions ${member.oldest_policy_version} to ` +
        `${member.newest_policy_version}, ${member.stop_reason}`),
      el("div", { class: "reward" }, member.actor), preferred(member)));
    const longest = Math.max(...members.map((member) => member.turns.length));
    const rows = Array.from({ length: longest }, (_, index) => el("tr", {}, members.map((member) => {
      const turn = member.turns[index];
      if (!turn) return cell();
      const earned = Object.values(turn.rewards).some((value) => value) ? rewardText(turn.rewards) : "";
      return cell(wanted.prompts === "shown" ? words(turn.prompt, "prompt") : null,
        words(turn.action, kindOf(turn)), el("div", { class: "reward" }, earned));
    })));
    return list.replaceChildren(table(heads, rows, "siblings"));
  }
  main.replaceChildren(
    facts([["task", group.task], ["lag of the oldest token", group.lag], ["mean return", number(usual)]]),
    el("div", { class: "bar" },
      choice("siblings", ["side by side", "a tree"], wanted.as, set("as")),
      choice("order", ["by member", "by return"], wanted.order, set("order")),
      choice("prompts", ["shown", "hidden"], wanted.prompts, set("prompts"))),
    list);
  draw();
}

// Tokens of an episode, coloured by what the reader chose.

const HUES = {
  "policy version": {
    of: (token, page) => COLOURS[Object.keys(page.lags).indexOf(String(token.version)) % COLOURS.length],
    keys: (page) => Object.entries(page.lags).map(([version, lag], place) =>
      [COLOURS[place % COLOURS.length], `version ${version}` + (lag === null ? "" : `, lag ${lag}`)]),
  },
  lag: {
    of: (token, page) => lagColour(page.lags[token.version]),
    keys: (page) => [...new Set(Object.values(page.lags))].sort((a, b) => a - b).map((lag) => [lagColour(lag), "lag " + lag]),
  },
  "log-probability": {
    of: (token) => logprobColour(token.logprob),
    keys: () => [0, -1, -2, -4].map((value) => [logprobColour(value), `${value} nats (${number(100 * Math.exp(value), 0)} %)`]),
  },
  "importance ratio": {
    needsLoss: true,
    of: (token) => ratioColour(token.ratio),
    keys: () => [0.5, 0.8, 1, 1.25, 2].map((value) => [ratioColour(value), `${value} times as likely now`]),
  },
  advantage: {
    needsLoss: true,
    of: (token) => advantageColour(token.advantage),
    keys: () => [-2, -1, 0, 1, 2].map((value) => [advantageColour(value), (value > 0 ? "+" : "") + value]),
  },
  mask: { needsLoss: true, of: (token) => FATES[token.fate]?.[0] || "", keys: () => FATES },
  nothing: { of: () => "", keys: () => [] },
};
// What the loss made of a token: see replay/records/step_tokens.py.
const FATES = [["rgba(39, 174, 96, 0.35)", "trained"], ["rgba(214, 137, 16, 0.5)", "at the clip: no gradient"],
  ["rgba(192, 57, 43, 0.5)", "left out, by the mask or as too old"]];
const GREEN = "39, 174, 96", BLUE = "41, 128, 185", ORANGE = "214, 137, 16", RED = "192, 57, 43";
const shade = (colour, strength) => `rgba(${colour}, ${Math.min(0.85, Math.abs(strength))})`;
// Equally strong for a half and a double.
const ratioColour = (value) => (unknown(value) ? "" : shade(value > 1 ? BLUE : RED, Math.log(Math.max(value, 1e-6))));
const advantageColour = (value) => (unknown(value) ? "" : shade(value > 0 ? GREEN : RED, value / 2.5));
const lagColour = (lag) => shade(ORANGE, lag === null ? 0 : lag / Math.max(1, run.max_lag));
const logprobColour = (value) => shade(RED, value / 5);

function tokenNodes(turn, page, hue) {
  return turn.tokens.texts.map((text, place) => {
    const tokens = turn.tokens;
    const token = { version: tokens.versions[place], logprob: tokens.logprobs[place],
      ratio: tokens.ratios?.[place], advantage: tokens.advantages?.[place], fate: tokens.fates?.[place] };
    const lag = page.lags[token.version];
    const old = lag !== null && lag > run.max_lag;
    const title = `version ${token.version}` + (lag === null ? "" : `, lag ${lag}`) + `, log-probability ${token.logprob}` +
      ` (${number(100 * Math.exp(token.logprob), 1)} %)` + lossText(token) + (old ? ", older than replay.max_lag: left out of the loss" : "");
    return el("span", { class: old ? "token old" : "token", title, colour: HUES[hue].of(token, page) }, text);
  });
}

function lossText(token) {
  if (unknown(token.fate)) return "";
  return `, advantage ${number(token.advantage)}, ratio ${number(token.ratio)}, ${FATES[token.fate]?.[1]}`;
}

async function showEpisode(step, groupId, member, hue) {
  const place = `steps/${step}/groups/${groupId}`;
  const [page, group] = await Promise.all([get(`${place}/members/${member}`), get(place)]);
  const list = el("div", {});
  const keys = el("div", { class: "bar" });
  function draw(hue) {
    const swatches = HUES[hue].keys(page).map(([colour, text]) => el("span", { class: "key", colour }, text));
    const hues = Object.keys(HUES).filter((name) => page.has_loss || !HUES[name].needsLoss);
    keys.replaceChildren(choice("colour of tokens", hues, hue, draw), ...swatches);
    list.replaceChildren(...page.turns.map((turn, index) => el("section", {},
      el("h2", {}, "turn " + index, el("span", { class: "quiet" }, ` ${turn.num_tokens} tokens, log-probability ` +
        `${number(turn.logprob_mean)} mean, ${number(turn.logprob_min)} least`)),
      turn.new_branch ? el("p", { class: "quiet" }, "A new sequence: the chat template rewrote earlier text.") : null,
      words(turn.prompt, "prompt"),
      words(tokenNodes(turn, page, hue), kindOf(turn)),
      el("div", { class: "reward quiet" }, `reward: ${rewardText(turn.rewards)}; ` +
        `${turn.valid_action ? "valid" : "invalid"} action, ended by ${turn.finish_reason}; generation ` +
        `${number(turn.generate_s, 2)} s, environment ${number(turn.env_s, 2)} s`))));
  }
  const sampling = page.sampling;
  main.replaceChildren(
    facts([["task", page.task], ["return", number(page.return)], ["reward by part", rewardText(page.rewards)],
      ["score", number(page.score)], ["result", yesOrNo(page.success)], ["stop reason", page.stop_reason],
      ["turns", page.num_turns], ["tokens", page.num_tokens], ["lag of the oldest token", page.lag],
      ["sampled at", `temperature ${sampling.temperature}, top_p ${sampling.top_p}, top_k ${sampling.top_k}`],
      ["attempt", page.attempt], ["seconds", number(page.duration_s, 2)],
      ["actor", `${page.actor} on ${page.host} (${page.instance_kind})`]]),
    neighbours(place + "/members/", group.members.map((each) => each.member), member, "member "),
    el("p", { class: "quiet" }, "The sampled tokens are coloured; prompts are grey and in no loss. " +
      (page.has_loss ? "Ratios are of the policy before the step to the one that sampled, before any cut."
        : `No advantages, ratios and masks: ${page.loss_note}.`)),
    keys, list);
  draw(Object.hasOwn(HUES, hue) && (page.has_loss || !HUES[hue].needsLoss) ? hue : "policy version");
}

async function showSearch(text, before, hits) {
  const found = await get(`search?text=${encodeURIComponent(text)}&before=${before}`);
  hits = hits.concat(found.hits);
  const rows = hits.map((hit) => {
    const at = hit.excerpt.toLowerCase().indexOf(text.toLowerCase());
    const marked = at < 0 ? [hit.excerpt]
      : [hit.excerpt.slice(0, at), el("mark", {}, hit.excerpt.slice(at, at + text.length)), hit.excerpt.slice(at + text.length)];
    return el("tr", {}, numberCell(link(`steps/${hit.step}/groups/${hit.group_id}/members/${hit.member}`,
      `step ${hit.step}, group ${hit.group_id}, member ${hit.member}`)), numberCell("turn " + hit.turn), cell(hit.where),
    cell(el("div", { class: "words" }, marked)));
  });
  const more = found.next === null ? el("p", { class: "quiet" }, "No earlier step has it.")
    : el("button", { onclick: () => guarded(() => showSearch(text, found.next, hits)) }, `search before step ${found.next}`);
  const unreadable = found.unreadable.length ? `; steps that cannot be read: ${found.unreadable.join(", ")}` : "";
  main.replaceChildren(el("p", {}, `${hits.length} turns contain "${text}"${unreadable}`), table(["episode", "", "in", "text"], rows), more);
}

// Places, besides the report: #steps/12/groups/345/members/6/COLOUR, #steps/12/groups/345/tree, #from/50, #search/TEXT.

function trail(parts) {
  const links = [link("", run.name)];
  if (parts[0] === "from") links.push(link(parts.join("/"), "steps"));
  if (parts[0] === "steps") {
    for (let place = 0; place + 1 < parts.length; place += 2) {
      links.push(link(parts.slice(0, place + 2).join("/"), `${parts[place].slice(0, -1)} ${parts[place + 1]}`));
    }
  }
  document.getElementById("trail").replaceChildren(...links);
  document.title = links.map((each) => each.textContent).join(" / ");
}

async function guarded(show) {
  try {
    await show();
  } catch (error) {
    if (!(error instanceof Elsewhere)) main.replaceChildren(el("p", { class: "error" }, error.message));
  }
}

async function navigate() {
  const place = location.hash.slice(1);
  const parts = place.split("/");
  await guarded(async () => {
    report.hidden = place !== "";
    if (!run || parts[0] !== "steps") run = await get("run");
    trail(parts);
    window.scrollTo(0, 0);
    if (place === "") return main.replaceChildren();
    if (parts[0] === "search") return showSearch(decodeURIComponent(place.slice(7)), run.steps[run.steps.length - 1] + 1, []);
    if (parts[0] !== "steps") return showSteps(Math.max(0, Number(parts[1]) || 0));
    const [step, group, member] = [1, 3, 5].map((index) => (parts[index] === undefined ? undefined : Number(parts[index])));
    if (member !== undefined) return showEpisode(step, group, member, decodeURIComponent(parts[6] || ""));
    return group !== undefined ? showGroup(step, group, parts[4]) : showStep(step);
  });
}

const form = document.getElementById("search");
form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (form.elements.text.value) location.hash = "search/" + encodeURIComponent(form.elements.text.value);
});
form.hidden = Boolean(embedded);
window.addEventListener("hashchange", navigate);
navigate();
