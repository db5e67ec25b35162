-- spend: (judge, then requests, tokens and cost to add, then their sums as the caller last knew them) -> the sums of the
-- run, and what was wrong with those before. A sum that is no number, or smaller than the caller has seen it, counts on
-- from what the caller knows. It deletes first, so that it works at maxmemory too: see begin.lua.
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then redis.call('DEL', KEYS[1]) end
local reply, flaw = {}, ''
for i, what in ipairs({ 'requests', 'tokens', 'cost' }) do
  local field, known = ARGV[1] .. ' ' .. what, tonumber(ARGV[4 + i])
  local written = redis.call('HGET', KEYS[1], field)
  local sum = tonumber(written or 0)
  if not sum or not (sum >= known and sum < 2 ^ 53) then
    flaw = field .. ' was ' .. string.sub(written or 'missing', 1, 40)
    sum = known
  end
  reply[i] = string.format('%.17g', sum + ARGV[1 + i])
  redis.call('HDEL', KEYS[1], field)
  redis.call('HSET', KEYS[1], field, reply[i])
end
reply[4] = flaw
return reply
