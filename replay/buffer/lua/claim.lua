-- claim: (epoch, number, step, num_groups, oldest_allowed, max_uses, 1 if groups of equal returns come
-- beside the num_groups or else 0) -> {group id, ticket, uses, verdict, member records ...} for each; if there are fewer,
-- only those of equal returns; false if stale groups may be left to sweep: call it again. The claims of an epoch are numbered: a claim that is repeated because its reply was lost gets the same groups
-- again, and a late one gets nothing.
local refusal = fenced_out(ARGV[1])
if refusal then return refusal end
local number = tonumber(ARGV[2])
local step, num_groups, oldest_allowed = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local max_uses, sets_apart = tonumber(ARGV[6]), ARGV[7] == '1'
local SWEEP = 100
local last_claim = base .. ':last_claim' -- epoch, number, group ids ...

-- Drops groups without any token of policy version `oldest_allowed` or newer: none of their tokens would be trained.
local function sweep()
  local stale = redis.call('ZRANGEBYSCORE', base .. ':ready_by_version', '-inf', '(' .. oldest_allowed, 'LIMIT', 0, SWEEP)
  for _, id in ipairs(stale) do
    must_be_sound(id, 'ready')
    local newest = redis.call('HGET', group_key(id), 'newest_policy_version')
    if tonumber(newest) >= tonumber(oldest_allowed) then error('DAMAGED: group ' .. id .. ' is of version ' .. newest) end
    leave(id, 'ready')
    drop(id, 'too_old')
  end
  return #stale < SWEEP
end

-- The groups to claim, those that finished first, each with its uses so far: all or none of `num_groups`, and those that
-- are set apart. A group is used once per step: groups that this step has claimed already are skipped.
local function choose()
  local chosen, apart = {}, {}
  for i = 0, redis.call('ZCARD', base .. ':ready') - 1 do
    if #chosen == num_groups then break end
    local id = redis.call('ZRANGE', base .. ':ready', i, i)[1]
    must_be_sound(id, 'ready')
    local uses = uses_of(id)
    if (last_in(uses) or -1) < step and num_in(uses) < max_uses then
      local those = sets_apart and is_equal(id) and apart or chosen
      those[#those + 1] = { id, uses }
    end
  end
  if #chosen < num_groups then chosen = {} end
  for _, each in ipairs(apart) do chosen[#chosen + 1] = each end
  return chosen
end

local function claim()
  local chosen = choose()
  redis.call('DEL', last_claim)
  redis.call('RPUSH', last_claim, ARGV[1], number)
  for _, each in ipairs(chosen) do
    local id, uses = each[1], each[2] .. step .. ','
    redis.call('RPUSH', last_claim, id)
    leave(id, 'ready')
    redis.call('HSET', group_key(id), 'uses', uses)
    if num_in(uses) < max_uses then enter_ready(id) else enter(id, 'claimed', step) end
  end
end

-- A key of another type reads as missing: then no claim is known to be the last.
local last = or_nothing(redis.pcall('LRANGE', last_claim, 0, 1)) or {}
local last_number = last[1] == ARGV[1] and tonumber(last[2]) or -1
if number < last_number then return {} end
if number > last_number then
  expire_leases()
  if not sweep() then return false end
  claim()
end
local claimed = {}
for _, id in ipairs(redis.call('LRANGE', last_claim, 2, -1)) do
  local uses = uses_of(id)
  if last_in(uses) == step then
    local fields = { 'ticket', 'verdict' }
    for member = 0, size_of(id) - 1 do fields[#fields + 1] = 'member:' .. member end
    local group = redis.call('HMGET', group_key(id), unpack(fields))
    table.insert(group, 1, id)
    table.insert(group, 3, num_in(uses))
    claimed[#claimed + 1] = group
  end
end
return claimed
