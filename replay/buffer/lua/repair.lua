-- repair: (epoch or '' for a person) -> a line for each repair. Afterwards the books agree with what is stored. Damaged
-- groups are removed, and they are counted in the accounts `damaged`. Everything that can be computed from the groups,
-- such as the counts of the states and the indexes of ready groups, is computed again.
local refusal = fenced_out(ARGV[1])
if refusal then return refusal end
local repairs = {}

local function report(line)
  if #repairs < 100 then repairs[#repairs + 1] = line end
end

local function remove_unless(kind, name)
  local found = redis.call('TYPE', name).ok
  if found == kind or found == 'none' then return end
  redis.call('DEL', name)
  report(name .. ' was a ' .. found .. ' instead of a ' .. kind .. ': removed')
end

local function remove_other_types()
  remove_unless('hash', counters)
  for _, set in ipairs({ 'queued', 'leased', 'judging', 'ready', 'claimed', 'quarantined', 'ready_by_version',
    'ready_by_step' }) do
    remove_unless('zset', base .. ':' .. set)
  end
  remove_unless('list', base .. ':last_claim')
  remove_unless('list', base .. ':failures')
end

local function is_count(name, value)
  if string.find(name, '^returns:') then
    local sum = tonumber(value)
    return sum and sum - sum == 0
  elseif string.find(name, '^tokens:') or string.find(name, '^turns:') or string.find(name, '^duration_ms:') then
    return #value <= 18 and string.find(value, '^%d+$')
  elseif name == 'last_group_id' and value == '-1' then
    return true
  end
  -- Small enough that the equations can be balanced with doubles. A fence may be as large as the clock in milliseconds.
  return whole(value) and tonumber(value) < (name == 'last_fence' and 1e13 or 1e12)
end

-- Removes malformed counters: those that can be computed from the groups are counted again, the others restart at 0.
local function remove_malformed_counters()
  local fields = redis.call('HGETALL', counters)
  for i = 1, #fields, 2 do
    if not is_count(fields[i], fields[i + 1]) then
      redis.call('HDEL', counters, fields[i])
      report(counters .. ': ' .. fields[i] .. ' was not a number: removed')
    end
  end
end

local function remove_damaged(id, state, what)
  local fields = or_nothing(redis.pcall('HGETALL', group_key(id))) or {}
  for i = 1, #fields, 2 do
    local kind, member = string.match(fields[i], '^(%a+):(%d+)$')
    if kind == 'member' or kind == 'partial' then
      redis.call('UNLINK', payload_key(kind == 'member' and 'blob' or kind, id, member, fields[i + 1]))
    end
  end
  redis.call('DEL', group_key(id))
  for _, each in ipairs(STATES) do redis.call('ZREM', base .. ':' .. each, id) end
  report('group ' .. id .. ' (' .. state .. ') ' .. what .. ': removed')
end

-- The sound groups with their states; this removes the damaged ones.
local function sound_groups()
  local found, num_states = {}, {}
  for _, state in ipairs(STATES) do
    local places = redis.call('ZRANGE', base .. ':' .. state, 0, -1, 'WITHSCORES')
    for i = 1, #places, 2 do
      local id = places[i]
      num_states[id] = (num_states[id] or 0) + 1
      found[#found + 1] = { id, state, places[i + 1] }
    end
  end
  local groups = {}
  for _, each in ipairs(found) do
    local id, state, place = each[1], each[2], each[3]
    local what = num_states[id] > 1 and 'is in more than one state' or flaw(id, state)
      or tonumber(place) > 1e15 and 'was set back by an actor that could not use it'
    if what then remove_damaged(id, state, what) else groups[#groups + 1] = { id, state } end
  end
  return groups
end

local sums = { ['trajectories:held'] = 0, ['partials:held'] = 0, ready_uses = 0, ready_equal = 0 }
local highest = { last_group_id = -1, finished = 0 }
for _, state in ipairs(STATES) do sums[state] = 0 end

local function add_up(id, state)
  sums[state] = sums[state] + 1
  for member = 0, size_of(id) - 1 do
    local facts = redis.call('HMGET', group_key(id), 'member:' .. member, 'partial:' .. member)
    if facts[1] then sums['trajectories:held'] = sums['trajectories:held'] + 1 end
    if facts[2] then sums['partials:held'] = sums['partials:held'] + 1 end
  end
  highest.last_group_id = math.max(highest.last_group_id, tonumber(id))
  highest.finished = math.max(highest.finished, whole(redis.call('HGET', group_key(id), 'finished')) or 0)
end

-- Corrects the place of a group in the sorted set of its state, and adds a ready group to the indexes.
local function put_in_place(id, state)
  local group = redis.call('HMGET', group_key(id), 'finished', 'newest_policy_version')
  local place = state == 'queued' and id or state == 'ready' and group[1] or state == 'claimed' and last_use(id)
  if place then redis.call('ZADD', base .. ':' .. state, place, id) end
  if state ~= 'leased' then redis.call('HDEL', group_key(id), unpack(LEASE.leased)) end
  if state ~= 'judging' then redis.call('HDEL', group_key(id), unpack(LEASE.judging)) end
  if state ~= 'ready' then return end
  redis.call('ZADD', base .. ':ready_by_version', group[2], id)
  if is_equal(id) then sums.ready_equal = sums.ready_equal + 1 end
  local step = last_use(id)
  if step then
    redis.call('ZADD', base .. ':ready_by_step', step, id)
    sums.ready_uses = sums.ready_uses + num_uses(id)
  end
end

local function set_counter(name, number)
  local before = redis.call('HGET', counters, name) or '0'
  redis.call('HSET', counters, name, number)
  if tonumber(before) ~= number then report(counters .. ': ' .. name .. ' was ' .. before .. ', and is ' .. number) end
end

-- The value of an account, or the sum of all accounts with a prefix that ends with a colon.
local function in_accounts(name)
  local sum, fields, is_prefix = 0, redis.call('HGETALL', counters), string.sub(name, -1) == ':'
  for i = 1, #fields, 2 do
    if fields[i] == name or (is_prefix and string.sub(fields[i], 1, #name) == name) then sum = sum + fields[i + 1] end
  end
  return sum
end

-- Makes one equation of the books true: the counter `come` must equal the sum of the other accounts. If it is larger,
-- the difference is counted as `lost`; if it is smaller, it is raised.
local function balance(come, lost, ...)
  local gap = tonumber(redis.call('HGET', counters, come) or '0')
  for _, account in ipairs({ ... }) do gap = gap - in_accounts(account) end
  if gap > 0 then
    count(lost, gap)
    report(gap .. ' of ' .. come .. ' are counted as ' .. lost)
  elseif gap < 0 then
    count(come, 0 - gap)
    report(come .. ' was ' .. (0 - gap) .. ' too low')
  end
end

remove_other_types()
remove_malformed_counters()
local groups = sound_groups()
redis.call('DEL', base .. ':ready_by_version', base .. ':ready_by_step')
for _, group in ipairs(groups) do
  add_up(group[1], group[2])
  put_in_place(group[1], group[2])
end
for name, number in pairs(sums) do set_counter(name, number) end
for name, number in pairs(highest) do
  if (tonumber(redis.call('HGET', counters, name) or '-2')) < number then set_counter(name, number) end
end
balance('opened', 'dropped:damaged', 'trained', 'dropped:', 'queued', 'leased', 'judging', 'ready', 'claimed',
  'quarantined')
balance('trajectories:inserted', 'trajectories:dropped:damaged', 'trajectories:trained', 'trajectories:dropped:',
  'trajectories:held')
balance('partials:handed_in', 'partials:discarded:damaged', 'partials:resumed', 'partials:discarded:', 'partials:held')
count('repairs', 1)
return repairs
