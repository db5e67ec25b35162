-- claim: (epoch, number, step, num_groups, oldest allowed policy_version, order, seed, max_uses, samples_per_insert,
-- error_buffer) -> {ticket, uses, member records ...} for each; nothing while there are fewer, or the limiter says no;
-- false after a sweep that may not have seen all, to be called again. The claims of an epoch are numbered: one that is
-- repeated because its reply was lost gets the same groups again, and one that comes late gets nothing.
local refusal = fenced_out(ARGV[1])
if refusal then return refusal end
local number = tonumber(ARGV[2])
local step, num_groups, oldest_allowed = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local order, seed, max_uses = ARGV[6], ARGV[7], tonumber(ARGV[8])
local samples_per_insert, error_buffer = tonumber(ARGV[9]), tonumber(ARGV[10])
local SWEEP = 100
local last_claim = base .. ':last_claim' -- epoch, number, group ids ...

local function sweep()
  local stale = redis.call('ZRANGEBYSCORE', base .. ':ready_by_version', '-inf', '(' .. oldest_allowed, 'LIMIT', 0, SWEEP)
  for _, id in ipairs(stale) do
    leave(id, 'ready')
    drop(id, 'too_old')
  end
  return #stale < SWEEP
end

local function within_limit()
  if samples_per_insert == 0 then return true end
  local made = redis.call('HMGET', counters, 'claims', 'finished')
  return (made[1] or 0) + num_groups <= samples_per_insert * (made[2] or 0) + error_buffer
end

local num_ready
local shuffled = {}

-- The places 0 .. num_ready - 1 in random order, one by one: a shuffle that touches only what it gives out.
local function random_place(i)
  local random = tonumber(string.sub(redis.sha1hex(seed .. ':' .. step .. ':' .. i), 1, 12), 16)
  local j = i + random % (num_ready - i)
  local place = shuffled[j] or j
  shuffled[j] = shuffled[i] or i
  return place
end

local candidate = {
  oldest = function(i) return redis.call('ZRANGE', base .. ':ready', i, i)[1] end,
  freshest = function(i) return redis.call('ZREVRANGE', base .. ':ready', i, i)[1] end,
  uniform = function(i)
    local place = random_place(i)
    return redis.call('ZRANGE', base .. ':ready', place, place)[1]
  end,
  prioritised = function(i)
    return string.match(redis.call('ZRANGE', base .. ':ready_by_score', i, i)[1], ':(.*)$')
  end,
}

-- A group is used once a step: what this step has claimed already is passed over.
local function draw()
  local ids = {}
  for i = 0, num_ready - 1 do
    if #ids == num_groups then break end
    local id = candidate[order](i)
    if (last_use(id) or -1) < step and num_uses(id) < max_uses then ids[#ids + 1] = id end
  end
  return ids
end

local function claim()
  num_ready = redis.call('ZCARD', base .. ':ready')
  local ids = within_limit() and draw() or {}
  redis.call('DEL', last_claim)
  redis.call('RPUSH', last_claim, ARGV[1], number)
  if #ids < num_groups then return end
  for _, id in ipairs(ids) do
    redis.call('RPUSH', last_claim, id)
    leave(id, 'ready')
    redis.call('HSET', group_key(id), 'uses', (redis.call('HGET', group_key(id), 'uses') or '') .. step .. ',')
    if num_uses(id) < max_uses then enter_ready(id) else enter(id, 'claimed', step) end
    count('claims', 1)
  end
end

local last = redis.call('LRANGE', last_claim, 0, 1)
local last_number = last[1] == ARGV[1] and tonumber(last[2]) or -1
if number < last_number then return {} end
if number > last_number then
  expire_leases()
  if not sweep() then return false end
  claim()
end
local claimed = {}
for _, id in ipairs(redis.call('LRANGE', last_claim, 2, -1)) do
  if last_use(id) == step then
    local group = group_key(id)
    local fields = { 'ticket' }
    for member = 0, redis.call('HGET', group, 'num_members') - 1 do
      fields[#fields + 1] = 'member:' .. member
    end
    claimed[#claimed + 1] = redis.call('HMGET', group, unpack(fields))
    table.insert(claimed[#claimed], 2, num_uses(id))
  end
end
return claimed
