-- Appends tokens if (epoch, length) are the record's own: compare and set. Renews the lease.
-- A repeat is answered as the first was: tokens that are there already, from the same length on, are not appended
-- again. With a whole record in ARGV[10...] it is written where there is none, as after an empty restart; where there is
-- one of the same request it may have more tokens than these, as when its router begins again without having seen it. Log
-- probabilities are as many bytes for each token, or none at all.
-- KEYS: record, tokens, log probabilities.  ARGV: epoch, owner or '', length, tokens, finished, lease ms, ttl ms, log
-- probabilities of the tokens, '1' where the seed of a record that is there may be another, field, value, ...
local held = redis.call('HMGET', KEYS[1], 'epoch', 'owner', 'finished')
if not held[1] then
  if #ARGV == 9 then
    return { 'MISSING' }
  end
  redis.call('HSET', KEYS[1], unpack(ARGV, 10))
  redis.call('DEL', KEYS[2], KEYS[3])
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
if held[1] and #ARGV > 9 then
  for index = 10, #ARGV, 2 do
    local name = ARGV[index]
    local free = name == 'salt' or name == 'epoch' or name == 'owner' or name == 'finished'
    free = free or (name == 'seed' and ARGV[9] == '1')
    if not free and redis.call('HGET', KEYS[1], name) ~= ARGV[index + 1] then
      return { 'STALE', length / 4 }
    end
  end
  if length > last and ARGV[5] ~= '1' then
    known = last - first
  end
end
if known > 0 and redis.call('GETRANGE', KEYS[2], first, first + known - 1) ~= string.sub(ARGV[4], 1, known) then
  return { 'STALE', length / 4 }
end
if length < last then
  if held[3] == '1' then
    return { 'STALE', length / 4 }
  end
  redis.call('APPEND', KEYS[2], string.sub(ARGV[4], known + 1))
  if #ARGV[8] > 0 then
    redis.call('APPEND', KEYS[3], string.sub(ARGV[8], known * (#ARGV[8] / #ARGV[4]) + 1))
  end
end
local time = redis.call('TIME')
local lease = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[6])
if ARGV[5] == '1' then
  redis.call('HSET', KEYS[1], 'lease', lease, 'finished', '1')
else
  redis.call('HSET', KEYS[1], 'lease', lease)
end
for _, key in ipairs(KEYS) do
  redis.call('PEXPIRE', key, ARGV[7])
end
return { 'OK' }
