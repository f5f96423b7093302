{{- /* 65 % of the limit, in bytes: rewriting the append-only file forks, and what is written meanwhile is copied. */ -}}
{{- define "tandem.redisMaxMemory" -}}
{{- $limit := .Values.redis.internal.resources.limits.memory | toString }}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "P" 1000000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 }}
{{- $unit := regexFind "[A-Za-z]*$" $limit }}
{{- mulf (trimSuffix $unit $limit | float64) (get $units $unit) 0.65 | floor | int64 }}
{{- end }}

{{- /* As `up` starts its private one: on disk, and nothing is ever thrown out. */ -}}
{{- define "tandem.redisConfig" -}}
port 6379
bind * -::*
protected-mode {{ .Values.redis.auth.disabled | ternary "no" "yes" }}
dir /data
appendonly yes
appendfsync everysec
save ""
maxmemory {{ include "tandem.redisMaxMemory" . }}
maxmemory-policy noeviction
databases 1
daemonize no
logfile ""
{{- end }}

{{- /* The password goes from its file into another one in memory, in a form that takes any byte; never into arguments. */ -}}
{{- define "tandem.redisStart" -}}
set -eu
umask 077
cp /etc/tandem/redis/redis.conf /run/redis/redis.conf
chmod 0600 /run/redis/redis.conf
if [ -f /etc/tandem/secrets/redis-password ]; then
  password=$(cat /etc/tandem/secrets/redis-password)
  hex=$(printf %s "$password" | od -An -v -tx1 | tr -d ' \n' | sed 's/../\\x&/g')
  printf '\nrequirepass "%s"\n' "$hex" >> /run/redis/redis.conf
fi
exec redis-server /run/redis/redis.conf
{{- end }}

{{- define "tandem.redisAsk" -}}
if [ -f /etc/tandem/secrets/redis-password ]; then
  REDISCLI_AUTH=$(cat /etc/tandem/secrets/redis-password)
  export REDISCLI_AUTH
fi
[ "$(redis-cli -p 6379 ping)" = PONG ]
{{- end }}
