-- claim: (epoch, claim id, step, num_groups, oldest allowed policy_version) -> {ticket, member records ...} for each.
-- A claim that is repeated because its reply was lost gets the same groups again.
local refusal = fenced_out(ARGV[1])
if refusal then return refusal end
local step, num_groups, oldest_allowed = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local last_claim = base .. ':last_claim'
if redis.call('LINDEX', last_claim, 0) ~= ARGV[2] then
  expire_leases()
  for _, id in ipairs(redis.call('ZRANGE', base .. ':ready', 0, -1)) do
    if tonumber(redis.call('HGET', group_key(id), 'oldest_policy_version')) < oldest_allowed then
      drop(id, 'ready', 'too_old')
    end
  end
  local ids = redis.call('ZRANGE', base .. ':ready', 0, num_groups - 1)
  if #ids < num_groups then return {} end
  redis.call('DEL', last_claim)
  redis.call('RPUSH', last_claim, ARGV[2])
  for _, id in ipairs(ids) do
    redis.call('RPUSH', last_claim, id)
    leave(id, 'ready')
    enter(id, 'claimed', step)
  end
end
local claimed = {}
for _, id in ipairs(redis.call('LRANGE', last_claim, 1, -1)) do
  if redis.call('ZSCORE', base .. ':claimed', id) then
    local group = group_key(id)
    local fields = { 'ticket' }
    for member = 0, redis.call('HGET', group, 'num_members') - 1 do
      fields[#fields + 1] = 'member:' .. member
    end
    claimed[#claimed + 1] = redis.call('HMGET', group, unpack(fields))
  end
end
return claimed
