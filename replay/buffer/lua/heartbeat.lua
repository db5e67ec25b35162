-- heartbeat: (actor, ttl_ms, then group_id, fence for each) -> ids of the leases that are valid for another ttl_ms.
-- It renews before it sweeps: a late heartbeat saves a lease that no sweep has ended yet.
local held = renew('leased')
expire_leases()
return held
