-- The commands of Redis that the verbs use, over plain tables: a model of the server, which test_sim_store compares
-- with a real one. `keys` maps a name to {kind, value, expires in ms}. A hash and a list keep their order.
local keys, commands, clock_us, pairs = {}, {}, 0, pairs
local WRONG_KIND = 'WRONGTYPE Operation against a key holding the wrong kind of value'
local KINDS = { string = 'string', hash = 'hash', zset = 'zset', list = 'list', set = 'set', stream = 'stream' }

local function now_ms() return math.floor(clock_us / 1000) end

local function found(name)
  local entry = keys[name]
  if entry and entry.expires and entry.expires <= now_ms() then
    keys[name] = nil
    return nil
  end
  return entry
end

local function of_kind(kind, name)
  local entry = found(name)
  if entry and entry.kind ~= kind then error(WRONG_KIND, 0) end
  return entry
end

local function made(kind, name)
  local entry = of_kind(kind, name)
  if not entry then
    entry = { kind = KINDS[kind], value = {}, size = 0 }
    if kind == 'hash' then entry.order = {} end
    keys[name] = entry
  end
  return entry
end

local function as_text(number)
  if number == math.huge then return 'inf' elseif number == -math.huge then return '-inf' end
  if number % 1 == 0 and math.abs(number) < 1e14 then return tostring(number) end
  return string.format('%.17g', number)
end

local function whole(text, what)
  if not string.find(text, '^-?%d+$') then error('ERR ' .. (what or 'value') .. ' is not an integer or out of range', 0) end
  return tonumber(text)
end

local function bound(text)
  local exclusive = string.sub(text, 1, 1) == '('
  if exclusive then text = string.sub(text, 2) end
  local number = text == '+inf' and math.huge or text == '-inf' and -math.huge or text == 'inf' and math.huge or tonumber(text)
  if not number then error('ERR min or max is not a float', 0) end
  return number, exclusive
end

function commands.TIME() return { tostring(math.floor(clock_us / 1e6)), tostring(clock_us % 1e6) } end
function commands.TYPE(name) local entry = found(name); return { ok = entry and entry.kind or 'none' } end
function commands.EXISTS(name) return found(name) and 1 or 0 end
function commands.DEL(...)
  local num = 0
  for _, name in ipairs({ ... }) do
    if found(name) then num = num + 1 end
    keys[name] = nil
  end
  return num
end
commands.UNLINK = commands.DEL
function commands.EXPIRE(name, seconds)
  local entry = found(name)
  if entry then entry.expires = now_ms() + 1000 * seconds end
  return entry and 1 or 0
end
function commands.PERSIST(name)
  local entry = found(name)
  if not entry or not entry.expires then return 0 end
  entry.expires = nil
  return 1
end
function commands.PTTL(name)
  local entry = found(name)
  return not entry and -2 or not entry.expires and -1 or entry.expires - now_ms()
end
function commands.RENAME(name, new)
  local entry = found(name)
  if not entry then error('ERR no such key', 0) end
  keys[name] = nil
  keys[new] = entry
  return { ok = 'OK' }
end

function commands.GET(name) local entry = of_kind('string', name); return entry and entry.value or false end
function commands.MGET(...)
  local values = {}
  for i, name in ipairs({ ... }) do
    local entry = found(name)
    values[i] = entry and entry.kind == 'string' and entry.value or false
  end
  return values
end
function commands.SET(name, value, ...)
  local options, expires = { ... }, nil
  for i, option in ipairs(options) do
    if option == 'EX' then expires = now_ms() + 1000 * options[i + 1] end
    if option == 'PX' then expires = now_ms() + options[i + 1] end
    if option == 'NX' and found(name) then return false end
  end
  keys[name] = { kind = 'string', value = value, expires = expires }
  return { ok = 'OK' }
end

function commands.HGET(name, field) local entry = of_kind('hash', name); return entry and entry.value[field] or false end
function commands.HEXISTS(name, field) local entry = of_kind('hash', name); return entry and entry.value[field] and 1 or 0 end
function commands.HMGET(name, ...)
  local entry, values = of_kind('hash', name), {}
  for i, field in ipairs({ ... }) do values[i] = entry and entry.value[field] or false end
  return values
end
function commands.HSET(name, field, value, ...)
  local entry = made('hash', name)
  local num_new = entry.value[field] == nil and 1 or 0
  if num_new == 1 then entry.size, entry.order[#entry.order + 1] = entry.size + 1, field end
  entry.value[field] = value
  if ... then return num_new + commands.HSET(name, ...) end
  return num_new
end
function commands.HDEL(name, ...)
  local entry, num = of_kind('hash', name), 0
  if not entry then return 0 end
  for _, field in ipairs({ ... }) do
    if entry.value[field] ~= nil then
      entry.value[field], num = nil, num + 1
      for i, each in ipairs(entry.order) do
        if each == field then table.remove(entry.order, i) break end
      end
    end
  end
  entry.size = entry.size - num
  if entry.size == 0 then keys[name] = nil end
  return num
end
function commands.HGETALL(name)
  local entry, flat = of_kind('hash', name), {}
  for _, field in ipairs(entry and entry.order or {}) do
    flat[#flat + 1] = field
    flat[#flat + 1] = entry.value[field]
  end
  return flat
end
function commands.HINCRBY(name, field, by)
  local entry = of_kind('hash', name)
  local value = whole(entry and entry.value[field] or '0', 'hash value') + whole(by)
  commands.HSET(name, field, as_text(value))
  return value
end
function commands.HINCRBYFLOAT(name, field, by)
  local entry = of_kind('hash', name)
  local value = tonumber(entry and entry.value[field] or '0')
  if not value then error('ERR hash value is not a float', 0) end
  commands.HSET(name, field, as_text(value + by))
  return as_text(value + by)
end

local function ranked(entry)
  if not entry then return {} end
  if not entry.sorted then
    entry.sorted = {}
    for member in pairs(entry.value) do entry.sorted[#entry.sorted + 1] = member end
    local scores = entry.value
    table.sort(entry.sorted, function(a, b)
      if scores[a] ~= scores[b] then return scores[a] < scores[b] end
      return a < b
    end)
  end
  return entry.sorted
end
local function forget_rank(entry, member)
  for i, each in ipairs(entry.sorted or {}) do
    if each == member then table.remove(entry.sorted, i) return end
  end
end
local function rank(entry, member)
  local sorted, scores = entry.sorted, entry.value
  if not sorted then return end
  local score, place = scores[member], #sorted + 1
  while place > 1 do
    local other = sorted[place - 1]
    if scores[other] < score or scores[other] == score and other < member then break end
    place = place - 1
  end
  table.insert(sorted, place, member)
end
function commands.ZADD(name, score, member)
  local entry, number = made('zset', name), bound(score)
  local is_new = entry.value[member] == nil
  if is_new then entry.size = entry.size + 1 else forget_rank(entry, member) end
  entry.value[member] = number
  rank(entry, member)
  return is_new and 1 or 0
end
function commands.ZREM(name, ...)
  local entry, num = of_kind('zset', name), 0
  for _, member in ipairs({ ... }) do
    if entry and entry.value[member] then
      forget_rank(entry, member)
      entry.value[member], num = nil, num + 1
      entry.size = entry.size - 1
      if entry.size == 0 then keys[name] = nil end
    end
  end
  return num
end
function commands.ZSCORE(name, member)
  local entry = of_kind('zset', name)
  return entry and entry.value[member] and as_text(entry.value[member]) or false
end
function commands.ZCARD(name) local entry = of_kind('zset', name); return entry and entry.size or 0 end

local function with_scores(entry, members, wanted)
  if not wanted then return members end
  local flat = {}
  for _, member in ipairs(members) do
    flat[#flat + 1] = member
    flat[#flat + 1] = as_text(entry.value[member])
  end
  return flat
end
local function slice(list, first, last)
  first, last = tonumber(first), tonumber(last)
  if first < 0 then first = math.max(0, #list + first) end
  if last < 0 then last = #list + last end
  local part = {}
  for i = first + 1, math.min(last + 1, #list) do part[#part + 1] = list[i] end
  return part
end
local function within(entry, low, high)
  local least, above = bound(low)
  local most, below = bound(high)
  local members = {}
  for _, member in ipairs(ranked(entry)) do
    local score = entry.value[member]
    if (score > least or score == least and not above) and (score < most or score == most and not below) then
      members[#members + 1] = member
    end
  end
  return members
end
function commands.ZRANGE(name, first, last, scores)
  local entry = of_kind('zset', name)
  return with_scores(entry, slice(ranked(entry), first, last), scores)
end
function commands.ZREVRANGE(name, first, last)
  local reversed = {}
  for _, member in ipairs(ranked(of_kind('zset', name))) do table.insert(reversed, 1, member) end
  return slice(reversed, first, last)
end
function commands.ZRANGEBYSCORE(name, low, high, limit, offset, num)
  local members = within(of_kind('zset', name), low, high)
  if not limit then return members end
  return slice(members, offset, offset + num - 1)
end
function commands.ZCOUNT(name, low, high) return #within(of_kind('zset', name), low, high) end
function commands.ZREMRANGEBYSCORE(name, low, high)
  return commands.ZREM(name, unpack(within(of_kind('zset', name), low, high)))
end

function commands.RPUSH(name, ...)
  local entry = made('list', name)
  for _, value in ipairs({ ... }) do entry.value[#entry.value + 1] = value end
  return #entry.value
end
function commands.LPUSH(name, value)
  local entry = made('list', name)
  table.insert(entry.value, 1, value)
  return #entry.value
end
function commands.LRANGE(name, first, last)
  local entry = of_kind('list', name)
  return slice(entry and entry.value or {}, first, last)
end
function commands.LTRIM(name, first, last)
  local entry = of_kind('list', name)
  if entry then entry.value = slice(entry.value, first, last) end
  return { ok = 'OK' }
end
function commands.SADD(name, member) made('set', name).value[member] = true; return 1 end
function commands.SREM(name, member)
  local entry = of_kind('set', name)
  if entry then entry.value[member] = nil end
  if entry and not next(entry.value) then keys[name] = nil end
  return 0
end
function commands.SRANDMEMBER(name)
  local entry, first = of_kind('set', name), false
  for member in pairs(entry and entry.value or {}) do if not first or member < first then first = member end end
  return first
end
function commands.XADD(name, id, field, value)
  local entry = made('stream', name)
  entry.value[#entry.value + 1] = { id, { field, value } }
  return id
end

-- For scripts: in the order of the names, so that a schedule repeats.
_G.pairs = function(map)
  local names, i = {}, 0
  for name in pairs(map) do names[#names + 1] = name end
  table.sort(names)
  return function()
    i = i + 1
    return names[i], map[names[i]]
  end
end

redis = {}
function redis.error_reply(text) return { err = text } end
local function run(name, a, b, c, ...) -- a table of the arguments would take as long as the command
  if type(a) == 'number' then a = as_text(a) end
  if type(b) == 'number' then b = as_text(b) end
  if type(c) == 'number' then c = as_text(c) end
  if select('#', ...) == 0 then return commands[name](a, b, c) end
  local others = { ... }
  for i, argument in ipairs(others) do
    if type(argument) == 'number' then others[i] = as_text(argument) end
  end
  return commands[name](a, b, c, unpack(others))
end
redis.call = run
function redis.pcall(...)
  local worked, reply = pcall(run, ...)
  if worked then return reply end
  return { err = reply }
end

local function copied(value)
  if type(value) ~= 'table' then return value end
  local copy = {}
  for name, each in pairs(value) do copy[name] = copied(each) end
  return copy
end

-- What Python calls: the reply of one command or script at a time of the clock.
local function execute(at_us, script, ...)
  clock_us = at_us
  if type(script) == 'string' then return pcall(run, script, ...) end
  local arguments = { ... }
  local num_keys = arguments[1]
  KEYS, ARGV = {}, {}
  for i = 2, #arguments do
    if i <= num_keys + 1 then KEYS[i - 1] = arguments[i] else ARGV[i - num_keys - 1] = arguments[i] end
  end
  local worked, reply = pcall(script) -- some return nothing
  return worked, reply
end
-- Of a reply that is a table: its kind, the text of an error or of a status, and the parts of a list to the first nil.
local function unpacked(reply)
  if reply.err then return 'err', reply.err end
  if reply.ok then return 'ok', reply.ok end
  local num = 0
  while reply[num + 1] ~= nil do num = num + 1 end
  return 'list', '', unpack(reply, 1, num)
end
local function saved() return copied(keys) end
local function restore(snapshot) keys = copied(snapshot or {}) end
local function names(at_us)
  clock_us = at_us
  local all = {}
  for name in pairs(keys) do
    if found(name) then all[#all + 1] = name end
  end
  table.sort(all)
  return all
end
return execute, unpacked, saved, restore, names
