-- books: -> the counters, for a learner. It raises DAMAGED if they contradict the sorted sets; then the books are
-- repaired.
for _, state in ipairs(STATES) do
  local name = base .. ':' .. state
  local num_there, num_counted = redis.call('ZCARD', name), redis.call('HGET', counters, state) or '0'
  if whole(num_counted) ~= num_there then
    error('DAMAGED: ' .. counters .. ' counts ' .. num_counted .. ' groups as ' .. state .. ', there are ' .. num_there)
  end
  if redis.call('ZCOUNT', name, '(1e15', '+inf') > 0 then error('DAMAGED: an actor set back a group, ' .. state) end
end
local index = base .. ':ready_by_version'
if redis.call('ZCARD', index) ~= redis.call('ZCARD', base .. ':ready') then
  error('DAMAGED: ' .. index .. ' is incomplete')
end
return redis.call('HGETALL', counters)
