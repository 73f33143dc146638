-- Appends tokens if (epoch, length) are the record's own: compare and set. Renews the lease.
-- A repeat is answered as the first was: tokens that are there already, from the same length on, are not appended
-- again. With a whole record in ARGV[8...] it is written where there is none, as after an empty restart.
-- KEYS: record, tokens.  ARGV: epoch, owner or '', length, tokens, finished, lease ms, ttl ms, field, value, ...
local held = redis.call('HMGET', KEYS[1], 'epoch', 'owner', 'finished')
if not held[1] then
  if #ARGV == 7 then
    return { 'MISSING' }
  end
  redis.call('HSET', KEYS[1], unpack(ARGV, 8))
  redis.call('DEL', KEYS[2])
elseif held[1] ~= ARGV[1] or held[2] == '' or (ARGV[2] ~= '' and held[2] ~= ARGV[2]) then
  return { 'FENCED', held[1], held[2] }
end
local length = redis.call('STRLEN', KEYS[2])
local first = ARGV[3] * 4
local last = first + #ARGV[4]
local known = length - first
if known < 0 then
  return { 'STALE', length / 4 }
end
if known > 0 and redis.call('GETRANGE', KEYS[2], first, length - 1) ~= string.sub(ARGV[4], 1, known) then
  return { 'STALE', length / 4 }
end
if length < last then
  if held[3] == '1' then
    return { 'STALE', length / 4 }
  end
  redis.call('APPEND', KEYS[2], string.sub(ARGV[4], known + 1))
end
local time = redis.call('TIME')
local lease = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[6])
if ARGV[5] == '1' then
  redis.call('HSET', KEYS[1], 'lease', lease, 'finished', '1')
else
  redis.call('HSET', KEYS[1], 'lease', lease)
end
redis.call('PEXPIRE', KEYS[1], ARGV[7])
redis.call('PEXPIRE', KEYS[2], ARGV[7])
return { 'OK' }
