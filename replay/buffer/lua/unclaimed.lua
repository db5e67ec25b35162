-- unclaimed: -> the ids of the groups that are queued, leased, judging or ready, at one instant.
local ids = {}
for _, state in ipairs({ 'queued', 'leased', 'judging', 'ready' }) do
  for _, id in ipairs(redis.call('ZRANGE', base .. ':' .. state, 0, -1)) do
    if not whole(id) then error('DAMAGED: ' .. base .. ':' .. state .. ' contains ' .. id) end
    ids[#ids + 1] = id
  end
end
return ids
