//! The date for templates that print it.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// The current time in UTC by a `strftime` format (C locale).
///
/// # Errors
/// The conversion that is not known.
pub(super) fn strftime_now(format: &str) -> Result<String, String> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    strftime(format, now.as_secs())
}

/// `seconds` since 1970 in UTC by a `strftime` format.
fn strftime(format: &str, seconds: u64) -> Result<String, String> {
    let (days, second) = (seconds / 86400, seconds % 86400);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let date = Date::from_days(days);
    let month = MONTHS[date.month as usize - 1];
    let weekday = WEEKDAYS[(days as usize + 4) % 7];
    let hour12 = (hour + 11) % 12 + 1;
    let mut text = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let directive = rest.next();
        text += &match directive {
            Some('Y') => date.year.to_string(),
            Some('y') => format!("{:02}", date.year % 100),
            Some('m') => format!("{:02}", date.month),
            Some('d') => format!("{:02}", date.day),
            Some('j') => format!("{:03}", date.day_of_year),
            Some('B') => month.to_owned(),
            Some('b') => month[..3].to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('H') => format!("{hour:02}"),
            Some('I') => format!("{hour12:02}"),
            Some('M') => format!("{minute:02}"),
            Some('S') => format!("{second:02}"),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('%') => "%".to_owned(),
            other => {
                let directive: String = other.into_iter().collect();
                return Err(format!("strftime_now does not know `%{directive}`"));
            }
        };
    }
    Ok(text)
}

/// A day of the Gregorian calendar.
struct Date {
    year: u64,
    month: u64,
    day: u64,
    day_of_year: u64,
}

impl Date {
    /// The day that lies `days` after 1970-01-01.
    fn from_days(mut days: u64) -> Self {
        let leap = |year: u64| {
            year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
        };
        // 400 years are 146 097 days; the rest is at most that many steps of a year.
        let mut year = 1970 + days / 146_097 * 400;
        days %= 146_097;
        while days >= 365 + u64::from(leap(year)) {
            days -= 365 + u64::from(leap(year));
            year += 1;
        }
        let day_of_year = days + 1;
        let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        let mut month = 1;
        for length in lengths {
            if days < length {
                break;
            }
            days -= length;
            month += 1;
        }
        Self { year, month, day: days + 1, day_of_year }
    }
}

#[cfg(test)]
mod tests {
    use super::strftime;

    /// Expected values by Python's `datetime.fromtimestamp(s, timezone.utc).strftime`.
    #[test]
    fn dates_are_pythons() {
        let all = "%A %a %d %B %b %m %Y %y %j %H %I %M %S %p %%";
        for (seconds, expected) in [
            (0, "Thursday Thu 01 January Jan 01 1970 70 001 00 12 00 00 AM %"),
            (951_782_399, "Monday Mon 28 February Feb 02 2000 00 059 23 11 59 59 PM %"),
            (951_868_800, "Wednesday Wed 01 March Mar 03 2000 00 061 00 12 00 00 AM %"),
            (1_735_646_400, "Tuesday Tue 31 December Dec 12 2024 24 366 12 12 00 00 PM %"),
            (4_107_542_400, "Monday Mon 01 March Mar 03 2100 00 060 00 12 00 00 AM %"),
        ] {
            assert_eq!(strftime(all, seconds).as_deref(), Ok(expected));
        }
        assert!(strftime("%Q", 0).is_err());
    }
}
